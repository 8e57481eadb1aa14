"""benchmarks.heal."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import heal

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.full
def test_the_time_to_the_next_group_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.heal", "--json", str(file)]
    options = ["--layouts", "aa,aab", "--rounds", "1"]
    result = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    measured = json.loads(file.read_text())["measurements"]
    found = {(each["layout"], each["part"], each["contender"]) for each in measured}
    assert found == set(product(("aa", "aab"), heal.PARTS, heal.CONTENDERS))


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--contenders", "lunch"], "lunch"),
        (["--layouts", "a"], "has fewer than two ranks"),
        (["--rounds", "0"], "rounds"),
    ],
)
def test_senseless_options_are_refused(options: list[str], cause: str) -> None:
    result = CliRunner().invoke(heal.app, options)
    assert result.exit_code == 2
    assert cause in " ".join(result.output.split())
