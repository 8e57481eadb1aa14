"""benchmarks.profile_cases."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import profile_cases
from torch_hbmcomm.bench.result import Result

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.full
def test_pairs_of_a_case_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.profile_cases", "--json", str(file)]
    options = ["--cases", "fsdp2", "--pairs", "7", "--steps", "1"]
    result = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = Result.from_json(file.read_text())
    assert [(one.of["section"], one.contender, one.summary.n) for one in found.measurements] == [
        ("fsdp2", state, 7) for state in ("before", "after")
    ]
    staged = [note for note in found.notes if "of tensors outside of the segment" in note]
    assert not any(note.startswith("fsdp2, after: ") for note in staged)


def test_streams_of_ranks_have_each_image_once() -> None:
    whole = list(itertools.islice(profile_cases.Images(0, 1), 8))
    parts = [list(itertools.islice(profile_cases.Images(rank, 2), 4)) for rank in range(2)]
    for number, (pixels, label) in enumerate(whole):
        own, same = parts[number % 2][number // 2]
        assert torch.equal(own, pixels) and same == label


def test_a_sampler_by_length_has_each_sequence_once() -> None:
    sequences = [torch.zeros(length) for length in torch.randperm(64).tolist()]
    sampler = profile_cases.ByLength(sequences)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 32
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(64))
    for first, second in batches:
        assert abs(len(sequences[first]) - len(sequences[second])) == 1


def test_a_case_without_its_package_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = profile_cases.run(profile_cases.CasesPlan(["stream"]))
    assert result.measurements == []
    assert "accelerate is not installed" in result.unavailable["stream"]
    profile_cases.render(result)


@pytest.mark.parametrize(
    ("options", "cause"),
    [(["--cases", "lunch"], "lunch"), (["--pairs", "6"], "pairs"), (["--steps", "0"], "steps")],
)
def test_senseless_choices_are_refused(options: list[str], cause: str) -> None:
    result = CliRunner().invoke(profile_cases.app, options)
    assert result.exit_code == 2
    assert cause in " ".join(result.output.split())
