"""How times grow with the number of ranks: measured, fitted, extrapolated. See docs/scaling.md."""
