"""The soak runs, for a few seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness.jobs import run

SOAK = Path(__file__).resolve().parents[1] / "soak.py"


@pytest.mark.full
def test_a_short_soak() -> None:
    """Check that the soak prints its seed, and finds no leak."""
    done = run([sys.executable, SOAK, "--cycles", "3", "--kills", "2", "--minutes", "0.05"])
    assert done.code == 0, done.output
    assert done.output.startswith("seed "), done.output
    assert done.output.count("nothing grew, nothing left") == 3, done.output
