"""benchmarks.collectives, and plots of records."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from harness import Context, Pool, families
from typer.testing import CliRunner

from benchmarks import front_page, plot, programs
from benchmarks.collectives import __main__ as main
from benchmarks.collectives import native
from benchmarks.collectives.native import InstalledMpi, IntelMpi
from benchmarks.collectives.open_mpi import OpenMpi
from torch_hbmcomm.bench import collectives as installed
from torch_hbmcomm.bench.collectives import COLLECTIVES
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.result import Result, sampled

ROOT = Path(__file__).resolve().parents[3]

needs_programs = pytest.mark.skipif(
    programs.why_unavailable() is not None, reason="the native programs have not been built"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)


def measured_by(names: str, file: Path, *arguments: str) -> list[tuple[str, str, int]]:
    """Run the benchmark, which checks results, with these contenders. Return the measured rows."""
    result = run(
        "benchmarks.collectives",
        *("--contenders", names, "--rounds", "1", "--startup-rounds", "0", "--json", str(file)),
        *arguments,
    )
    assert result.returncode == 0, result.stderr
    entries = json.loads(file.read_text())["measurements"]
    assert all(entry["minimum_us"] > 0 for entry in entries)
    return sorted((entry["collective"], entry["dtype"], entry["bytes"]) for entry in entries)


@needs_programs
def test_hbm_does_every_collective_without_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    found = measured_by(
        "hbm-c-staged", tmp_path / "out.json", "--sizes", "48", "--dtype", "float16"
    )
    assert found == sorted(
        (name, "float16", 0 if name == "barrier" else 48) for name in COLLECTIVES
    )
    assert not list(temporary.glob("hbmcomm-bench-*"))


@pytest.mark.full
@needs_programs
@pytest.mark.parametrize("processes", [2, 3])
def test_plain_loops_through_slots_are_measured(tmp_path: Path, processes: int) -> None:
    """The program checks the results. 3 MiB go through each ring of slots more than once."""
    sizes = ("--sizes", "8,48,3MiB", "--dtype", "float32", "--ranks", str(processes))
    found = measured_by("slots", tmp_path / "out.json", *sizes)
    names = ("allreduce", "broadcast", "sendrecv")
    assert found == sorted((name, "float32", size) for name in names for size in (8, 48, 3 << 20))


@needs_programs
def test_mpi_does_every_collective_without_python(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    found = measured_by("mpi-c", file, "--sizes", "48", "--dtype", "float32,int32,bfloat16")
    sized = [name for name in COLLECTIVES if name != "barrier"]
    assert found == sorted(
        [("barrier", "float32", 0), *product(sized, ("float32", "int32"), (48,))]
    )
    refused = {"mpi-c, bfloat16": "it takes float32, float64, int32"}
    assert json.loads(file.read_text())["unavailable"] == refused


@needs_programs
def test_integers_are_measured_with_hbm_gloo_and_mpi(tmp_path: Path) -> None:
    """Each contender checks its results."""
    everywhere = ("broadcast", "gather", "allreduce")
    contenders = ["hbm-zero-copy", "hbm-staged", "hbm-mpi", "hbm-c-staged", "gloo", "mpich"]
    contenders += ["mpi-c-in-place", "mpi-c-staged", "mpi-objects"]
    found = measured_by(
        ",".join(contenders),
        tmp_path / "out.json",
        *("--collectives", ",".join(everywhere), "--sizes", "48", "--dtype", "int32"),
    )
    assert found == sorted((name, "int32", 48) for name in everywhere for _ in contenders)


@pytest.mark.full
@needs_programs
def test_native_programs_are_measured_together(tmp_path: Path) -> None:
    """Measure all of them in one job, because its start takes longest. They check the results."""
    hbm = ("hbm-c-zero-copy", "hbm-c-staged", "hbm-c-mpi", "hbm-c-mpi-abi")
    cells = {name: [*COLLECTIVES] for name in (*hbm, "mpi-c")}
    for name in ("mpi-c-in-place", "mpi-c-staged"):
        cells[name] = ["allreduce", "broadcast", "gather"]
    file = tmp_path / "out.json"
    sizes = ("--sizes", "48,3MiB", "--dtype", "float64,bfloat16")
    measured_by(",".join(cells), file, "--ranks", "3", *sizes)
    found = [
        (entry["contender"], entry["collective"], entry["dtype"], entry["bytes"])
        for entry in json.loads(file.read_text())["measurements"]
    ]
    expected = [
        (name, collective, dtype, size)
        for name, collectives in cells.items()
        for collective in collectives
        for dtype in ("float64", "bfloat16")
        for size in ([0] if collective == "barrier" else [48, 3 << 20])
        if dtype == "float64" or (name in hbm and size > 0)
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.full
@needs_programs
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("mpi", [IntelMpi, OpenMpi], ids=lambda mpi: str(mpi.name))
def test_another_mpi_is_measured(tmp_path: Path, processes: int, mpi: type[InstalledMpi]) -> None:
    cause = mpi().why_unavailable()
    if cause is not None:
        pytest.skip(cause)
    found = measured_by(
        mpi.name, tmp_path / "out.json", "--ranks", str(processes), "--sizes", "48,3MiB"
    )
    assert {collective for collective, _, _ in found} == {*COLLECTIVES}


@pytest.mark.parametrize("mpi", [IntelMpi, OpenMpi], ids=lambda mpi: str(mpi.name))
def test_another_mpi_tells_how_to_install_it(
    mpi: type[InstalledMpi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "library", tmp_path / "libmpi.so")
    folder = os.path.relpath(ROOT / "build/mpi" / mpi.package)
    expected = f"pip install --ignore-installed --prefix {folder} {mpi.package}"
    assert mpi().why_unavailable() == expected

    monkeypatch.setattr(installed, "CONTENDERS", main.contenders())
    refused = CliRunner().invoke(main.app, ["--contenders", f"gloo,{mpi.name}"])
    assert refused.exit_code == 1
    assert f"{mpi.name}: {expected}" in refused.output


def test_each_contender_in_c_has_a_program_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program runs only the loop that was prepared last. If two contenders had one program, both
    would run the second one's loop."""
    monkeypatch.setattr(native, "meet", lambda _start: object())
    monkeypatch.setattr(native, "_rank", cache(native._rank.__wrapped__))
    found = [
        contender
        for contender in main.contenders().values()
        if isinstance(contender, native.InC) and not isinstance(contender, InstalledMpi)
    ]
    assert {"mpi-c", "mpi-c-in-place", "mpi-c-staged"} <= {one.name for one in found}
    started = [one.program() for one in found]
    assert len(set(map(id, started))) == len(found)
    assert [one.program() for one in found] == started


def test_open_mpi_needs_setpriv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert OpenMpi().why_unavailable() == "setpriv is not installed: apt install util-linux"


@needs_programs
def test_elements_that_have_no_equal_parts_are_refused(tmp_path: Path) -> None:
    libraries = os.path.join(sysconfig.get_path("data"), "lib")
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(programs.program("mpi_collectives", tmp_path, rank, 2, libraries))
            for rank in range(2)
        ]

        def all_do(*words: object) -> None:
            for rank in ranks:
                rank.tell(*words)
            for rank in ranks:
                rank.answer()

        all_do("ready")
        for rank in ranks:
            for collective in ("allgather", "gather", "scatter", "reduce_scatter", "alltoall"):
                for elements in (1, 3):
                    with pytest.raises(PeerFailed, match=rf"{elements} elements have no equal par"):
                        rank.ask("prepare", collective, 4 * elements, "float32")
        for elements in (0, 2):
            all_do("prepare", "allgather", 4 * elements, "float32")
        all_do("prepare", "allreduce", 12, "float32")


class Silent(programs.Conversation):
    """A program that never says that it has met the other ranks' programs."""

    def __init__(self) -> None:
        end, self.other = socket.socketpair()
        super().__init__("silent", end.makefile("w"), end.makefile("r"))


def meet_nobody(context: Context) -> None:
    native.MEET_SECONDS = 0.2
    with pytest.raises(PeerFailed, match=r"did not meet within 0\.2 s"):
        native.meet(lambda folder: Silent())


@pytest.mark.ranks(2)
def test_programs_that_do_not_meet_are_not_waited_for(pool: Pool) -> None:
    pool.run(meet_nobody)


@pytest.mark.full
def test_allreduce_is_measured_with_busy_processes(tmp_path: Path) -> None:
    """Sums are checked by the benchmark itself, after each block."""
    file = tmp_path / "out.json"
    result = run(
        "benchmarks.collectives.busy",
        *("--ranks", "2", "--busy", "0,1", "--sizes", "8,64KiB"),
        *("--operations", "10", "--rounds", "1", "--json", str(file)),
    )
    assert result.returncode == 0, result.stderr
    ways = ["single", "window", "bulk", "futures"]
    cells = [(busy, way, size) for busy in (0, 1) for way in ways for size in (8, 64 << 10)]
    measured = [
        ((entry["busy"], entry["way"], entry["bytes"]), entry["contender"])
        for entry in json.loads(file.read_text())["measurements"]
    ]
    assert measured == [(cell, name) for cell in cells for name in ("hbm", "gloo")]


def test_busy_processes_end_even_if_they_have_just_started() -> None:
    code = "from benchmarks.collectives.busy import busy_processes as busy\n"
    code += "for _ in range(200):\n    with busy(1):\n        pass\n"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    assert process.wait() == 0
    left = [fields for fields in families.processes().values() if fields[3] == str(process.pid)]
    assert left == []


def test_contenders_include_the_installed_commands() -> None:
    assert list(main.contenders()) == [
        "hbm-zero-copy", "hbm-staged", "hbm-mpi", "hbm-c-zero-copy", "hbm-c-staged", "hbm-c-mpi",
        "hbm-c-mpi-abi", "gloo", "mpich", "mpi-c", "mpi-c-in-place", "mpi-c-staged", "intel-mpi",
        "open-mpi", "mpi-objects", "deepspeed", "deepspeed-c", "nothing", "slots",
        "bound",
    ]  # fmt: skip


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    of = {"collective": "allreduce", "dtype": "float32", "bytes": 8}
    result = Result(
        benchmark="collectives",
        machine={"cpu": "a processor", "cores": 2, "torch": "2"},
        plan={"ranks": 2, "rounds": 1},
        contenders={"hbm-staged": "ours", "gloo": "theirs"},
        measurements=[sampled(of, "hbm-staged", [10.0]), sampled(of, "gloo", [30.0])],
    )
    plot.plot(Result.from_json(result.to_json()), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_front_page_plots_the_record_of_benchmarks_md() -> None:
    record = (ROOT / "benchmarks" / "collectives-2-ranks.json").read_text()
    fastest, typical = front_page.panels(Result.from_json(record))
    for panel in (fastest, typical):
        assert list(panel.lines) == list(front_page.LINES.values())
    for label, (sizes, times, _) in fastest.lines.items():
        assert sizes == typical.lines[label][0] == sorted(sizes)
        medians = typical.lines[label][1]
        assert all(low <= median for low, median in zip(times, medians, strict=True))


def test_the_front_page_refuses_a_record_without_gloo() -> None:
    empty = Result("collectives", {}, {}, {}, measurements=[])
    with pytest.raises(ValueError, match="no all_reduce of float32 by gloo"):
        front_page.panels(empty)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="has matplotlib")
def test_plotting_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    result = run("benchmarks.plot", "result.json", str(tmp_path / "plot.png"))
    assert result.returncode == 1
    assert "torch_hbmcomm[bench]" in result.stderr
