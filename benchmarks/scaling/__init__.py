"""The growth of times with the ranks: measured, fitted and extrapolated. See docs/scaling.md."""
