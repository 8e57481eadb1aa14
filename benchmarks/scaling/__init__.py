"""How time grows with ranks: measured here, fitted, and carried to clusters: docs/scaling.md."""
