"""benchmarks.profile_cost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import torch_hbmcomm
from benchmarks import profile_cost
from torch_hbmcomm.bench.result import Result

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.full
def test_pairs_of_steps_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.profile_cost", "--json", str(file)]
    options = ["--models", "compute-bound", "--pairs", "10", "--steps", "1"]
    result = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = Result.from_json(file.read_text())
    works = ("step, compute-bound", profile_cost.SMALL)
    assert [(one.of["work"], one.contender, one.summary.n) for one in found.measurements] == [
        (work, state, 10) for work in works for state in ("off", "on")
    ]


def test_the_order_of_a_pair_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = [False]
    order: list[str] = []

    @contextmanager
    def profile(_: str) -> Iterator[None]:
        recording[0] = True
        yield
        recording[0] = False

    def loop(samples: int, calls: int) -> list[float]:
        assert (samples, calls) == (1, 3)
        order.append("on" if recording[0] else "off")
        return [2.0 if recording[0] else 1.0]

    monkeypatch.setattr(torch_hbmcomm, "profile", profile)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    assert profile_cost._take_pairs(loop, 3, 3) == [(1.0, 2.0)] * 3
    assert order == ["off", "on", "on", "off", "off", "on"]


@pytest.mark.parametrize(
    ("options", "cause"),
    [(["--models", "lunch"], "lunch"), (["--pairs", "9"], "pairs"), (["--steps", "0"], "steps")],
)
def test_senseless_options_are_refused(options: list[str], cause: str) -> None:
    result = CliRunner().invoke(profile_cost.app, options)
    assert result.exit_code == 2
    assert cause in " ".join(result.output.split())
