"""`hbmcomm bench box`: its measurements through the public client, its output, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from torch_hbmcomm.bench.box import ROLE, SECTIONS, BoxPlan
from torch_hbmcomm.bench.peer import PeerFailed, peer
from torch_hbmcomm.bench.result import Findings, Measurement, Section, Unavailable, sampled
from torch_hbmcomm.bench.rounds import interleave, timed
from torch_hbmcomm.bench.summary import Summary
from torch_hbmcomm.cli import app

TINY = ["--quick", "--rounds", "1", "--largest", "64KiB"]
FIELDS = {
    "section", "operation", "bytes", "clients", "contender", "calls_per_sample", "n", "minimum_us",
    "lower_quartile_us", "median_us", "upper_quartile_us", "maximum_us", "mean_us",
}  # fmt: skip
ALONE = set(Summary.names("alone_", "us").values())


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "box", *arguments])


def measured(file: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run the benchmark; return its output and the JSON that it wrote."""
    result = invoke(*TINY, "--json", str(file), *arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split()), json.loads(file.read_text())


def contenders(document: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Return the contenders by section and operation."""
    found: dict[tuple[str, str], set[str]] = {}
    for entry in document["measurements"]:
        assert FIELDS <= set(entry) <= FIELDS | ALONE | {"p99_us", "values"}
        assert 0 < entry["minimum_us"] <= entry["median_us"] <= entry["maximum_us"]
        found.setdefault((entry["section"], entry["operation"]), set()).add(entry["contender"])
    return found


def test_the_box_is_measured_through_its_client(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    shown, document = measured(
        tmp_path / "out.json",
        *("--sections", "shm,tcp,accumulate,latency,store", "--store", str(tmp_path / "store")),
    )
    assert set(document) == {
        "benchmark", "machine", "plan", "sections", "contenders", "references", "unavailable",
        "notes", "measurements",
    }  # fmt: skip
    ours_by_operation = {
        ("shm", "read"): {"hbm shm", "memcpy"},
        ("shm", "write"): {"hbm shm", "memcpy"},
        ("tcp", "read"): {"hbm tcp"},
        ("accumulate", "float32"): {"hbm"},
        ("accumulate", "bfloat16"): {"hbm"},
        ("latency", "read"): {"hbm shm", "hbm tcp"},
        ("latency", "fetch_add"): {"hbm shm", "hbm tcp"},
        ("store", "accumulate float32"): {"hbm", "hbm, stored"},
    }
    assert ours_by_operation.items() <= contenders(document).items()
    assert "p99" in shown
    assert not list((tmp_path / "store").iterdir())


@pytest.mark.full
def test_each_client_has_its_share(tmp_path: Path) -> None:
    _, document = measured(tmp_path / "out.json", "--sections", "clients", "--clients", "2,3")
    entries = document["measurements"]
    assert {(entry["contender"], entry["operation"], entry["clients"]) for entry in entries} == {
        (contender, operation, count)
        for contender in ("hbm shm", "memcpy", "hbm tcp")
        for operation in ("read", "write", "read and write")
        for count in (2, 3)
    }
    for entry in entries:
        assert 0 <= entry["values"]["smallest_share"] <= 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sections", "shm,carrier-pigeon"], ["carrier-pigeon", "accumulate"]),
        (["--largest", "lots"], ["lots", "KiB"]),
        (["--clients", "two"], ["two"]),
        (["--clients", "0"], ["at least one"]),
        (["--store", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["--json", "/nowhere/at/all.json"], ["/nowhere/at/all.json", "directory"]),
        (["--png", "plot.png"], ["python -m benchmarks.plot"]),
    ],
)
def test_impossible_arguments_are_refused(arguments: Sequence[str], expected: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    for word in expected:
        assert word in result.output


@pytest.mark.parametrize(
    ("command", "module"),
    [("async-sgd", "papers.async_sgd"), ("layerdrop", "papers.layer_drop")],
)
def test_commands_that_reproduce_papers_have_moved(command: str, module: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, "--quick", "--sections", "node"])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert f"python -m {module}" in line


def test_a_box_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(plan: BoxPlan, findings: Findings) -> None:
        raise PeerFailed("box_peer has ended")

    monkeypatch.setitem(SECTIONS, "shm", Section("shm", "", measure))
    result = invoke("--sections", "shm")
    assert result.exit_code == 1
    assert "box_peer has ended" in result.stderr


def test_a_section_that_cannot_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(plan: BoxPlan, findings: Findings) -> None:
        raise Unavailable("not on this machine")

    monkeypatch.setitem(SECTIONS, "shm", Section("shm", "", measure))
    result = invoke("--sections", "shm")
    assert result.exit_code == 0
    assert "not measured: shm: not on this machine" in result.stdout


def test_contenders_alternate_in_rounds() -> None:
    turns: list[str] = []

    def takes(name: str, microseconds: float) -> Any:
        def run(samples: int, calls: int) -> list[float]:
            turns.append(name)
            return [microseconds] * samples

        return run

    found = interleave({"a": takes("a", 1e6), "b": takes("b", 5e3)}, rounds=3)
    assert turns[2:] == ["a", "b"] * 3 + ["a"] * 3 + ["b"] * 3  # interleaved, then alone
    assert (found["a"].interleaved, found["a"].alone) == ([1e6] * 3, [1e6] * 3)
    assert found["b"].interleaved == [5e3] * 6, "a turn has as many samples as fit"
    assert not interleave({"a": takes("a", 1.0)}, rounds=1)["a"].alone, "it was alone"


def test_a_sample_is_a_call_or_a_timeable_batch() -> None:
    asked: list[tuple[int, int]] = []

    def takes(microseconds: float) -> Any:
        def run(samples: int, calls: int) -> list[float]:
            asked.append((samples, calls))
            return [microseconds] * samples

        return run

    assert interleave({"long": takes(10.0)}, 1)["long"].calls == 1
    assert interleave({"short": takes(4.0)}, 1)["short"].calls == 3
    trials = [(3, 1), (30, 1)]
    assert asked == [*trials, (20, 1), *trials, (20, 3)]


def test_a_call_that_does_not_count_comes_first() -> None:
    calls: list[float] = []
    assert len(timed(lambda: calls.append(1))(4, 2)) == 4
    assert len(calls) == 1 + 4 * 2


def test_disturbed_contenders_are_named() -> None:
    def found(interleaved: list[float], alone: list[float]) -> Measurement:
        return sampled({}, "gloo", interleaved, alone=alone)

    assert found([100.0, 800.0, 900.0], [100.0, 200.0, 300.0]).disturbed
    assert not found([100.0, 210.0, 900.0], [100.0, 200.0, 900.0]).disturbed
    assert not found([100.0], []).disturbed


def test_sizes_need_not_end_with_a_page() -> None:
    with peer(ROLE, arguments=["box"]) as box, peer(ROLE) as client:
        url = box.ask(
            "open", listen="127.0.0.1:0", memory=1 << 20, token="secret", threads=1, store=None
        )
        client.ask("connect", url=url, token="secret", transport="shm", lanes=1, size=5000)
        client.ask("check", transport="shm")


def test_a_peer_tells_what_went_wrong() -> None:
    with peer(ROLE) as client, pytest.raises(PeerFailed, match="carrier-pigeon"):
        client.ask("connect", url="carrier-pigeon://", token="", transport="tcp", lanes=1, size=8)


def test_a_peer_that_dies_at_its_start_is_noticed() -> None:
    with pytest.raises(PeerFailed, match="no_such_peer"), peer("torch_hbmcomm.no_such_peer"):
        pass


def test_no_torch_is_needed() -> None:
    script = (
        "import sys; "
        "import torch_hbmcomm.cli.bench, torch_hbmcomm.bench.box, torch_hbmcomm.bench.box_peer; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
