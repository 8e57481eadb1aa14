"""benchmarks.failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import failures

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.full
def test_deaths_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.failures", "--json", str(file)]
    options = ["--layouts", "aaa,aab", "--rounds", "1", "--timeout", "5"]
    result = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = {
        (each["situation"], each["layout"], each["contender"]): each["values"]["named"]
        for each in json.loads(file.read_text())["measurements"]
    }
    for situation in ("allreduce", "init", "new_group"):
        for layout in ("aaa", "aab"):
            assert found[situation, layout, "hbm"] == 1
            assert (situation, layout, "gloo") in found
            assert found.get((situation, layout, "mpich"), 0) == 0, "MPI names no rank"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--situations", "lunch"], "lunch"),
        (["--layouts", "a", "--situations", "allreduce"], "has fewer than two ranks"),
        (["--layouts", "aaa,ab"], "init needs layouts of three ranks or more"),
    ],
)
def test_senseless_options_are_refused(options: list[str], cause: str) -> None:
    result = CliRunner().invoke(failures.app, options)
    assert result.exit_code == 2
    assert cause in " ".join(result.output.split())
