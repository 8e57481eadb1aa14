"""`hbmcomm bench box`: what it writes, what it refuses, and that no rival can stop it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from torch_hbmcomm.bench.box import result as box_result
from torch_hbmcomm.bench.box import rivals, table
from torch_hbmcomm.bench.box.interleave import interleave
from torch_hbmcomm.bench.box.memory import private
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.section import Findings, Goal, Section
from torch_hbmcomm.bench.box.sections import SECTIONS
from torch_hbmcomm.bench.box.verdict import verdicts
from torch_hbmcomm.bench.namespaces import NoNamespaces, two_nodes
from torch_hbmcomm.bench.peer import PeerFailed, peer
from torch_hbmcomm.bench.unavailable import Unavailable
from torch_hbmcomm.cli import app

TINY = ["--quick", "--rounds", "1", "--largest", "64KiB"]
FIELDS = {
    "section", "operation", "bytes", "contender", "clients", "samples_us", "median_us", "p99_us",
    "smallest_share",
}  # fmt: skip


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "box", *arguments])


def measured(file: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What it printed, and the JSON that it wrote."""
    result = invoke(*TINY, "--json", str(file), *arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split()), json.loads(file.read_text())


def contenders(document: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Who took part, by section and operation."""
    found: dict[tuple[str, str], set[str]] = {}
    for entry in document["measurements"]:
        assert set(entry) == FIELDS
        assert entry["median_us"] > 0
        found.setdefault((entry["section"], entry["operation"]), set()).add(entry["contender"])
    return found


def test_the_box_is_measured_beside_its_bounds(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    shown, document = measured(
        tmp_path / "out.json",
        *("--sections", "shm,tcp,accumulate,latency,store", "--store", str(tmp_path / "store")),
    )
    assert set(document) == {
        "machine", "sections", "unavailable", "notes", "rounds", "measurements",
    }  # fmt: skip
    found = contenders(document)
    ours_by_operation = {
        ("shm", "read"): {"hbm shm", "memcpy", "copy_bytes"},
        ("shm", "write"): {"hbm shm", "memcpy", "copy_bytes"},
        ("accumulate", "float32"): {"hbm", "triad"},
        ("accumulate", "bfloat16"): {"hbm", "triad"},
        ("latency", "read"): {"hbm shm", "hbm tcp", "sockets"},
        ("latency", "fetch_add"): {"hbm shm", "hbm tcp"},
        ("store", "accumulate float32"): {"hbm", "hbm, stored"},
    }
    assert ours_by_operation.items() <= found.items()
    for operation in ("read", "write"):
        others = found["tcp", operation] - {"iperf3"}
        assert others == {"hbm tcp", "sockets", "sockets, polled"}
    assert "of memcpy (≥ 95%)" in shown
    assert not list((tmp_path / "store").iterdir())


@pytest.mark.full
def test_each_client_has_its_share(tmp_path: Path) -> None:
    _, document = measured(tmp_path / "out.json", "--sections", "clients", "--clients", "2,3")
    entries = document["measurements"]
    assert {(entry["contender"], entry["clients"]) for entry in entries} == {
        (f"hbm {transport}", count) for transport in ("shm", "tcp") for count in (2, 3)
    }
    for entry in entries:
        assert 0 <= entry["smallest_share"] <= 1


@pytest.mark.full
def test_the_link_is_measured_by_what_crossed_it(tmp_path: Path) -> None:
    try:
        with two_nodes("1gbit"):
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))
    shown, document = measured(tmp_path / "out.json", "--sections", "link")
    assert contenders(document)["link", "write"] == {"hbm tcp", "sockets", "link"}
    assert "by its counter" in shown


def test_a_rival_that_cannot_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def absent(*_: object) -> Iterator[rivals.Prepare]:
        raise PeerFailed("it is not feeling well")
        yield

    @contextmanager
    def failing() -> Iterator[rivals.Prepare]:
        def timed(calls: int) -> float:
            raise PeerFailed("it fell ill")

        yield lambda size, operation: {"rpc": timed}

    monkeypatch.setattr(rivals, "_mpi", absent)
    monkeypatch.setattr(rivals, "_rpc", failing)
    shown, document = measured(tmp_path / "out.json", "--sections", "rivals")
    assert document["unavailable"]["rpc"] == "it fell ill"
    assert "not measured: mpi tcp: it is not feeling well" in shown
    assert contenders(document)["rivals", "add"] == {"hbm shm", "hbm tcp"}


@pytest.mark.full
def test_the_rivals_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    _, document = measured(tmp_path / "out.json", "--sections", "rivals")
    assert not document["unavailable"]
    everyone = {"hbm shm", "hbm tcp", "rpc"} | {
        f"{mpi} {way}" for mpi in ("mpi", "mpi tcp") for way in ("send", "one-sided")
    }
    for operation in ("write", "read", "add"):
        assert contenders(document)["rivals", operation] == everyone


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sections", "shm,carrier-pigeon"], ["carrier-pigeon", "accumulate"]),
        (["--largest", "lots"], ["lots", "KiB"]),
        (["--clients", "two"], ["two"]),
        (["--clients", "0"], ["at least one"]),
        (["--store", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["--json", "/nowhere/at/all.json"], ["/nowhere/at/all.json", "directory"]),
    ],
)
def test_it_refuses_what_cannot_be_measured(arguments: Sequence[str], told: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    for word in told:
        assert word in result.output


def test_a_box_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(plan: Plan, findings: Findings) -> None:
        raise PeerFailed("box_peer has ended")

    monkeypatch.setitem(SECTIONS, "shm", Section("shm", "", measure))
    result = invoke("--sections", "shm")
    assert result.exit_code == 1
    assert "box_peer has ended" in result.stderr


def test_a_section_that_cannot_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(plan: Plan, findings: Findings) -> None:
        raise Unavailable("not on this machine")

    monkeypatch.setitem(SECTIONS, "shm", Section("shm", "", measure))
    result = invoke("--sections", "shm")
    assert result.exit_code == 0
    assert "not measured: shm: not on this machine" in result.stdout


def row(subject: float, bound: float, **more: Any) -> dict[str, box_result.Measurement]:
    return {
        "ours": box_result.Measurement("s", "read", 4096, "ours", [subject], **more),
        "bound": box_result.Measurement("s", "read", 4096, "bound", [bound]),
    }


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
    section = Section("s", "", lambda plan, findings: None, [goal])
    (verdict,) = verdicts(section, row(10.0, 8.0, smallest_share=0.6))
    assert (verdict.text, verdict.reached) == (text, reached)


def test_a_goal_looks_at_its_operation_and_at_who_took_part() -> None:
    goals = [Goal("ours", ["bound"], "write", share=0.9), Goal("theirs", ["bound"], share=0.9)]
    section = Section("s", "", lambda plan, findings: None, goals)
    assert not list(verdicts(section, row(10.0, 8.0)))


def test_turns_are_taken_in_rounds() -> None:
    turns: list[str] = []

    def takes(name: str, seconds: float) -> Any:
        def timed(calls: int) -> float:
            turns.append(name)
            return calls * seconds

        return timed

    samples = interleave({"a": takes("a", 1.0), "b": takes("b", 2e-3)}, rounds=3)
    assert samples == {"a": [1e6] * 3, "b": pytest.approx([2e3] * 3)}
    assert turns[-8:] == ["a", "a", "b", "b"] * 2  # a call to come back to work, and the block


def test_private_memory_need_not_end_with_a_page() -> None:
    assert bytes(private(5000)) == b"\1" * 5000


def test_a_peer_tells_what_went_wrong() -> None:
    with peer("box.client_peer") as client, pytest.raises(PeerFailed, match="carrier-pigeon"):
        client.ask("connect", url="carrier-pigeon://", token="", transport="tcp", lanes=1, size=8)


def test_a_peer_that_dies_at_its_start_is_noticed() -> None:
    start = time.monotonic()
    with pytest.raises(PeerFailed, match="no_such_peer"), peer("box.no_such_peer"):
        pass
    assert time.monotonic() - start < 20


def test_the_plot_shows_what_has_a_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("torch_hbmcomm.bench.box.plot")
    result = finished()
    assert plot.panels(result) == [("shm", "read")]
    plot.save(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_missed_goal_is_red() -> None:
    console = Console(force_terminal=True, color_system="standard", width=160)
    with console.capture() as captured:
        console.print(table.render(finished()))
    lines = captured.get().splitlines()
    assert any("\x1b[31m50.0% of memcpy" in line for line in lines)
    assert any("not measured: verbs: no device" in line for line in lines)


def finished() -> box_result.Result:
    def took(size: int, contender: str, microseconds: float) -> box_result.Measurement:
        return box_result.Measurement("shm", "read", size, contender, [microseconds])

    return box_result.Result(
        machine={"cpu": "a processor", "cores": 2},
        sections={"shm": SECTIONS["shm"].about},
        unavailable={"verbs": "no device"},
        notes=[],
        rounds=1,
        measurements=[
            took(size, contender, factor * size / 1e4)
            for size in (1 << 20, 4 << 20)
            for contender, factor in (("hbm shm", 2.0), ("memcpy", 1.0))
        ],
    )


def test_no_torch_is_needed_but_by_its_own_rival() -> None:
    script = (
        "import sys; "
        "import torch_hbmcomm.bench.box.run, torch_hbmcomm.bench.box.table; "
        "import torch_hbmcomm.bench.box.client_peer; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
