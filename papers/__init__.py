"""Reproductions of the experiments of five papers; README.md lists the commands.

They use the package `benchmarks`, and run from a checkout: python -m papers.NAME.
"""

import sys
from pathlib import Path

# Makes the package `guest` importable. It runs the virtual machines of placement and verbs.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "vm"))
