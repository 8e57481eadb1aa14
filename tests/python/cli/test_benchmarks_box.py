"""benchmarks.box compares the memory box with bounds and rivals. A rival that fails is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import plot, programs
from benchmarks.box import __main__ as main
from benchmarks.box import rivals
from benchmarks.box.goals import Goal, column, verdicts
from benchmarks.namespaces import NoNamespaces, two_nodes
from torch_hbmcomm.bench import box
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.result import Measurement, Result, sampled

TINY = ["--quick", "--rounds", "1", "--largest", "64KiB"]

needs_programs = pytest.mark.skipif(
    programs.why_unavailable() is not None, reason="the native programs have not been built"
)


@pytest.fixture(autouse=True)
def all_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "SECTIONS", main.sections())


def measured(file: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run the benchmark; return its output and the JSON that it wrote."""
    runner = CliRunner(env={"COLUMNS": "200"})
    result = runner.invoke(main.app, [*TINY, "--json", str(file), *arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split()), json.loads(file.read_text())


def contenders(document: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Return the contenders by section and operation."""
    found: dict[tuple[str, str], set[str]] = {}
    for entry in document["measurements"]:
        assert entry["median_us"] > 0
        found.setdefault((entry["section"], entry["operation"]), set()).add(entry["contender"])
    return found


@needs_programs
def test_the_box_is_measured_with_its_bounds(tmp_path: Path) -> None:
    shown, document = measured(tmp_path / "out.json", "--sections", "shm,tcp,accumulate,latency")
    found = contenders(document)
    ours_by_operation = {
        ("shm", "read"): {"hbm shm", "memcpy", "copy_bytes", "hbm shm, Python"},
        ("shm", "write"): {"hbm shm", "memcpy", "copy_bytes", "hbm shm, Python"},
        ("accumulate", "float32"): {"hbm", "triad"},
        ("accumulate", "bfloat16"): {"hbm", "triad"},
    }
    assert ours_by_operation.items() <= found.items()
    assert {"hbm shm", "hbm tcp", "sockets"} <= found["latency", "read"]
    assert {"hbm shm", "hbm tcp"} <= found["latency", "fetch_add"]
    for operation in ("read", "write"):
        others = found["tcp", operation] - {"iperf3"}
        assert others == {"hbm tcp", "sockets", "sockets, polled"}
    assert "of memcpy (≥ 95%)" in shown


@needs_programs
@pytest.mark.full
def test_the_link_is_measured_by_its_counters(tmp_path: Path) -> None:
    try:
        with two_nodes("1gbit"):
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))
    shown, document = measured(tmp_path / "out.json", "--sections", "link")
    assert contenders(document)["link", "write"] == {"hbm tcp", "sockets", "link"}
    assert "by its counter" in shown


@needs_programs
def test_a_rival_that_cannot_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def absent(*_: object) -> Iterator[rivals.Prepare]:
        raise PeerFailed("it is not feeling well")
        yield

    @contextmanager
    def failing() -> Iterator[rivals.Prepare]:
        def timed(samples: int, calls: int) -> list[float]:
            raise PeerFailed("it fell ill")

        yield lambda size, operation: {"rpc": timed}

    monkeypatch.setattr(rivals, "_mpi", absent)
    monkeypatch.setattr(rivals, "_rpc", failing)
    shown, document = measured(tmp_path / "out.json", "--sections", "rivals")
    assert document["unavailable"]["rpc"] == "it fell ill"
    assert "not measured: mpi tcp: it is not feeling well" in shown
    assert contenders(document)["rivals", "add"] == {"hbm shm", "hbm tcp"}


@needs_programs
@pytest.mark.full
def test_the_rivals_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    _, document = measured(tmp_path / "out.json", "--sections", "rivals")
    # MPICH's one-sided calls over TCP may hang on a busy machine. The benchmark then leaves this
    # rival out, and names it.
    left_out = document["unavailable"]
    assert left_out.keys() <= {"mpi tcp"}
    assert all("gave no answer for" in cause for cause in left_out.values()), left_out
    others = {"hbm shm", "hbm tcp", "rpc", "mpi send", "mpi one-sided"}
    over_tcp = {"mpi tcp send", "mpi tcp one-sided"}
    for operation in ("write", "read", "add"):
        found = contenders(document)["rivals", operation]
        assert others <= found <= others | over_tcp
        assert left_out or found == others | over_tcp


def took(
    contender: str,
    microseconds: float,
    size: int = 4096,
    values: dict[str, float] | None = None,
) -> Measurement:
    of = {"section": "shm", "operation": "read", "bytes": size, "clients": 1}
    return sampled(of, contender, [microseconds], values=values or {})


def row(subject: float, bound: float, **values: float) -> dict[str, Measurement]:
    return {"ours": took("ours", subject, values=values), "bound": took("bound", bound)}


@pytest.mark.parametrize(
    ("goal", "text", "reached"),
    [
        (Goal("ours", ["bound"], share=0.95), "80.0% of bound (≥ 95%)", False),
        (Goal("ours", ["bound"], share=0.75), "80.0% of bound (≥ 75%)", True),
        (Goal("ours", ["bound"], times=1.5), "1.25x bound (≤ 1.5)", True),
        (Goal("ours", microseconds=5), "ours 10.0 µs (≤ 5 µs)", False),
        (Goal("ours", fair=0.5), "60.0% of ours's fair share (≥ 50%)", True),
    ],
)
def test_verdicts(goal: Goal, text: str, reached: bool) -> None:
    (verdict,) = verdicts([goal], row(10.0, 8.0, smallest_share=0.6))
    assert (verdict.text, verdict.reached) == (text, reached)


def test_a_goal_depends_on_its_operation_and_contenders() -> None:
    goals = [Goal("ours", ["bound"], "write", share=0.9), Goal("theirs", ["bound"], share=0.9)]
    assert not list(verdicts(goals, row(10.0, 8.0)))
    assert not column(goals, row(10.0, 8.0))


def test_the_plot_shows_what_has_a_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.plot(finished(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_missed_goal_is_red() -> None:
    console = Console(force_terminal=True, color_system="standard", width=160)
    with console.capture() as captured:
        console.print(box.render(finished()))
    lines = captured.get().splitlines()
    assert any("\x1b[31m50.0% of memcpy" in line for line in lines)
    assert any("not measured: verbs: no device" in line for line in lines)


def finished() -> Result:
    return Result(
        benchmark="box",
        machine={"cpu": "a processor", "cores": 2},
        plan={"rounds": 1},
        sections={"shm": ""},
        unavailable={"verbs": "no device"},
        measurements=[
            took(contender, factor * size / 1e4, size)
            for size in (1 << 20, 4 << 20)
            for contender, factor in (("hbm shm", 2.0), ("memcpy", 1.0))
        ],
    )


def test_no_torch_is_needed_but_by_its_own_rival() -> None:
    script = (
        "import sys; "
        "import benchmarks.box.__main__, torch_hbmcomm.bench.box_peer; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
