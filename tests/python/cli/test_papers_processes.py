"""papers.processes, and the ranks of papers.containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import programs
from papers import processes
from papers.containers.job import results_of
from papers.containers.podman import Division
from papers.containers.rank import COLLECTIVES, SERIES
from papers.processes import CONTENDERS, PROCESS, Room
from torch_hbmcomm.bench.collectives import CollectivesPlan
from torch_hbmcomm.bench.result import Measurement, sampled
from torch_hbmcomm.sizes import KIB, MIB

ROOT = Path(__file__).resolve().parents[3]

needs_programs = pytest.mark.skipif(
    programs.why_unavailable() is not None, reason="the native programs have not been built"
)


def room(tensors: int, copies: float = 2.0, ranks: int = 4) -> Room:
    """Return a room that has `tensors` bytes for the copies of all tensors."""
    return Room(ranks, copies, ranks * PROCESS + tensors)


def test_tensors_have_the_requested_size_if_they_fit() -> None:
    assert room(8 * 48).fitting(48, tensors=4) == 48
    assert room(80 * MIB).fitting(10 * MIB, tensors=4) == 10 * MIB


def test_tensors_that_do_not_fit_have_the_largest_whole_size() -> None:
    assert room(80 * MIB - 1).fitting(10 * MIB, tensors=4) == 9 * MIB
    assert room(80 * MIB, copies=4.0).fitting(10 * MIB, tensors=4) == 5 * MIB
    assert room(80 * MIB).fitting(10 * MIB, tensors=8) == 5 * MIB


@pytest.mark.parametrize("tensors", [-MIB, 0, 8 * MIB - 1])
def test_too_little_memory_is_refused(tensors: int) -> None:
    with pytest.raises(ValueError, match=r"4 processes of 160 MiB.*take fewer ranks"):
        room(tensors).fitting(10 * MIB, tensors=4)


def test_the_sizes_are_printed_before_a_contender_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    asked: list[CollectivesPlan] = []

    def measured(plan: CollectivesPlan) -> list[Measurement]:
        [name] = [one.name for one in plan.contenders]
        asked.append(plan)
        for cell in plan.cells():
            of = {"collective": cell.collective, "dtype": cell.dtype, "bytes": cell.bytes}
            said.append(f"{name}: {cell}: ")
        return [sampled(of, name, [1.0])]

    free = 32 * PROCESS + 13 * 1024 * MIB
    monkeypatch.setattr(processes, "measured", measured)
    monkeypatch.setattr(processes, "free_memory", lambda: free)
    file = tmp_path / "out.json"
    ended = CliRunner().invoke(processes.app, ["--dtype=int32", f"--json={file}"])
    assert ended.exit_code == 0, ended.output
    lines = [line for line in ended.output.splitlines() if "of free memory" in line]
    assert len(lines) == len(said) == 3 * len(CONTENDERS)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))
    assert all("18 GiB of free memory, 32 processes of 160 MiB" in line for line in lines)

    sizes = {}
    for plan in asked:
        for cell in plan.cells():
            sizes[plan.contenders[0].name, cell.collective] = cell.bytes
    for name in CONTENDERS:
        whole = 92 * MIB if name == "mpi-objects" else 256 * MIB
        assert sizes[name, "broadcast"] == sizes[name, "allreduce"] == whole
        assert sizes[name, "gather"] == 32 * 16 * MIB
    assert {len(plan.contenders) for plan in asked} == {1}
    assert json.loads(file.read_text())["plan"]["ranks"] == 32


def test_processes_refuse_an_unknown_contender() -> None:
    refused = CliRunner().invoke(processes.app, ["--contenders=gloo"])
    assert refused.exit_code == 2
    assert "no contender 'gloo'" in refused.output


@needs_programs
def test_each_contender_has_its_own_ranks(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "papers.processes", "--ranks=2", "--size=48", "--part=1KiB"]
    command += ["--contenders=mpi-c-in-place,mpi-objects", "--rounds=1", "--dtype=int32"]
    result = subprocess.run(
        [*command, f"--json={file}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert [
        (one["contender"], one["collective"], one["dtype"], one["bytes"])
        for one in json.loads(file.read_text())["measurements"]
    ] == [
        (name, collective, "int32", size)
        for name in ("mpi-c-in-place", "mpi-objects")
        for collective, size in (("broadcast", 48), ("allreduce", 48), ("gather", 2 * KIB))
    ]


@pytest.mark.full
@needs_programs
@pytest.mark.parametrize("series", SERIES)
def test_ranks_of_containers_measure_integers_in_each_series(series: str) -> None:
    """The ranks check the results. They run on the host, without containers."""
    plan = {
        "series": series,
        "dtype": "int32",
        "collectives": [(name, 1024) for name in COLLECTIVES],
        "calls": 2,
    }
    found = results_of(Division(0), 2, "papers.containers.rank", plan)
    assert [len(seconds) for seconds in found] == [2, 2, 2]
    assert all(one > 0 for seconds in found for one in seconds)
