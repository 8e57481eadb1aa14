"""papers.async_sgd: its output and refusals, and the check of every sum."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from benchmarks import plot, verdict
from benchmarks.namespaces import NoNamespaces, two_nodes
from benchmarks.verdict import Row
from papers.async_sgd import contenders as who
from papers.async_sgd import emulation, goals, gradients, workload
from papers.async_sgd.__main__ import SECTIONS, app
from papers.async_sgd.box_exchanges import EXCHANGES
from papers.async_sgd.sections import LINK
from papers.async_sgd.workload import MODELS, parallel, sequential
from papers.plot import PANELS
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import Measurement, sampled
from torch_hbmcomm.bench.result import Result as Found
from torch_hbmcomm.sizes import MIB
from torch_hbmcomm.smb import Server, connect

FIELDS = {
    "section", "scenario", "model", "bytes", "compute_ms", "workers", "contender",
    "calls_per_sample", "n", "minimum_ms", "lower_quartile_ms", "median_ms", "upper_quartile_ms",
    "maximum_ms", "mean_ms",
}  # fmt: skip


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def measured(file: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run the benchmark; return its output and the JSON that it wrote."""
    result = invoke("--quick", "--json", str(file), *arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split()), json.loads(file.read_text())


@pytest.mark.full
def test_all_contenders_are_measured_on_one_machine(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    shown, document = measured(tmp_path / "out.json", "--sections", "node")
    assert not document["unavailable"]
    found = {(one["scenario"], one["contender"]) for one in document["measurements"]}
    assert found == {
        (scenario, name) for scenario in ("sequential", "parallel") for name in who.CONTENDERS
    }
    for one in document["measurements"]:
        assert set(one) == FIELDS
        assert one["median_ms"] > 0
        if one["scenario"] == "parallel":
            assert one["median_ms"] >= one["compute_ms"]
    assert "MPI / hbm shm zero-copy: mean" in shown


@pytest.mark.full
def test_the_link_is_measured_by_its_counters(tmp_path: Path) -> None:
    try:
        with two_nodes("1gbit"):
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))
    pytest.importorskip("mpi4py")
    _, document = measured(tmp_path / "out.json", "--sections", "link", "--workers", "1,2")
    assert not document["unavailable"]
    found = {(one["workers"], one["contender"]) for one in document["measurements"]}
    everyone = {who.TCP, who.MPI_TCP, who.RPC, goals.LINK}
    assert found == {(count, name) for count in (1, 2) for name in everyone}


def test_only_requested_parts_are_measured(tmp_path: Path) -> None:
    _, document = measured(
        tmp_path / "out.json",
        *("--sections", "node", "--scenarios", "sequential", "--transports", "tcp"),
        *("--contenders", "hbm shm,hbm tcp", "--workers", "1,3"),
    )
    found = {
        (one["scenario"], one["contender"], one["workers"]) for one in document["measurements"]
    }
    assert found == {("sequential", "hbm tcp", 1), ("sequential", "hbm tcp", 3)}


def test_workers_beyond_memory_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulation, "free_memory", lambda: emulation._SPARE + 7 * MIB)
    shown, document = measured(
        tmp_path / "out.json",
        *("--sections", "node", "--contenders", who.ZERO_COPY),
        *("--workers", "1,2"),
    )
    (cell,) = document["unavailable"]
    assert cell == "node, hbm shm zero-copy, Inception_v1, 2 workers"
    assert "needs 520 MiB" in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sections", "node,carrier-pigeon"], ["carrier-pigeon", "link"]),
        (["--models", "GPT"], ["GPT", "VGG16"]),
        (["--contenders", "snail"], ["snail", "MPI tcp"]),
        (["--transports", "smoke"], ["smoke", "shm"]),
        (["--scenarios", "never"], ["never", "parallel"]),
        (["--workers", "two"], ["two"]),
        (["--workers", "0"], ["at least one"]),
        (["--workers", "32", "--iterations", "100"], ["exactly"]),
        (["--json", "/nowhere/at/all.json"], ["/nowhere/at/all.json", "directory"]),
    ],
)
def test_impossible_arguments_are_refused(arguments: Sequence[str], expected: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    for word in expected:
        assert word in result.output


@pytest.mark.parametrize("way", EXCHANGES)
def test_exchanges_move_every_element(way: str) -> None:
    count = (33 * MIB + 52) // 4  # more than a block, and not a whole number of blocks
    with (
        Server(memory="128MiB", token="", unix=True) as server,
        connect(server.urls[-1], "", "shm") as box,
    ):
        shared, slot = box.alloc(4 * count), box.alloc(4 * count)
        pushed = gradients.multiple(count, 3)
        slot.write(source=pushed)
        fetched = np.zeros_like(pushed)
        exchange = EXCHANGES[way](shared, slot, pushed, fetched)
        exchange()
        exchange()
        gradients.check_multiple(fetched, 6)


def test_a_wrong_sum_is_found_out() -> None:
    weights = gradients.multiple(300_000, 5)
    gradients.check_multiple(weights, 5)
    gradients.check_between(weights, 4, 6)
    weights[299_999] += 1
    with pytest.raises(RuntimeError, match="element 299999"):
        gradients.check_multiple(weights, 5)
    with pytest.raises(RuntimeError, match="6 to 9"):
        gradients.check_between(weights, 6, 9)


def test_the_longer_of_computation_and_communication_is_seen() -> None:
    def exchange() -> None:
        time.sleep(0.02)

    assert min(sequential(exchange, 0.001, 3)) >= 0.02
    assert min(parallel(exchange, 0.04, 3)) >= 0.04
    assert sum(parallel(exchange, 0.001, 4)) >= 3 * 0.02  # no iteration waits for the last one


def test_communication_hides_behind_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exchange waits until the next iteration computes: without an overlap it would fail."""
    computing = [threading.Event() for _ in range(4)]
    computations, exchanges = iter(computing), iter(computing[1:])
    computing[3].set()  # no computation follows the last exchange

    def exchange() -> None:
        assert next(exchanges).wait(20)

    def compute(_: float) -> None:
        next(computations).set()

    clock = SimpleNamespace(sleep=compute, perf_counter=time.perf_counter)
    monkeypatch.setattr(workload, "time", clock)
    assert len(parallel(exchange, 1, 3)) == 3


def test_a_failing_exchange_ends_the_run() -> None:
    threads = []

    def exchange() -> None:
        threads.append(threading.current_thread())
        raise RuntimeError("the server is gone")

    with pytest.raises(RuntimeError, match="the server is gone"):
        parallel(exchange, 0.001, 3)
    assert [thread.is_alive() for thread in threads] == [False]


def took(
    contender: str, milliseconds: float, scenario: str = "sequential", workers: int = 2
) -> Measurement:
    of = {
        "section": "node", "scenario": scenario, "model": "Inception_v1", "bytes": 4096,
        "compute_ms": 100.0, "workers": workers,
    }  # fmt: skip
    return sampled(of, contender, [milliseconds], "ms")


def row(scenario: str = "sequential", **times: float) -> Row:
    return {name: took(name, time, scenario) for name, time in times.items()}


def test_ratios_are_means_of_all_rows() -> None:
    found = [row(ours=10, theirs=20), row(ours=10, theirs=60), row(theirs=5)]
    verdict = goals.faster("theirs", "ours", 4.5)(found)
    assert verdict is not None
    assert (verdict.text, verdict.reached) == (
        "theirs / ours: mean 4.00, 2.00 to 6.00 (≥ 4.5)",
        False,
    )
    assert goals.faster("absent", "ours", 2)(found) is None


def test_a_link_may_be_the_bound() -> None:
    found = [row(ours=10, theirs=15, link=9), row(ours=10, theirs=30, link=3)]
    bound = goals.faster_where_the_link_is_the_bound("theirs", "ours", 1)(found)
    free = goals.faster_where_the_link_is_not_the_bound("theirs", "ours", 2.1)(found)
    assert bound is not None and bound.reached and "mean 1.50" in bound.text
    assert free is not None and free.reached and "mean 3.00" in free.text


@pytest.mark.parametrize(
    ("ours", "theirs", "expected", "reached"),
    [(110.0, 180.0, "8.0 times less", True), (120.0, 180.0, "4.0 times less", False),
     (100.9, 180.0, "none in 1 of 1", True)],
)  # fmt: skip
def test_hidden_communication_is_judged(
    ours: float, theirs: float, expected: str, reached: bool
) -> None:
    verdict = goals.better_hidden("theirs", "ours", 7)([row("parallel", ours=ours, theirs=theirs)])
    assert verdict is not None
    assert expected in verdict.text
    assert verdict.reached is reached


def finished() -> Found:
    times = {who.PLAIN: 20.0, who.ZERO_COPY: 10.0, who.MPI: 30.0}
    return Found(
        benchmark="async_sgd",
        machine={"cpu": "a processor", "cores": 2},
        sections={"node": "on this machine", "link": LINK.about},
        contenders={name: who.CONTENDERS[name].about for name in times},
        unavailable={"link": "no network namespaces"},
        plan={"rounds": 1},
        measurements=[
            took(name, base + time, scenario, workers)
            for scenario, base in (("sequential", 0.0), ("parallel", 100.0))
            for workers in (2, 4)
            for name, time in times.items()
        ],
    )


def shown_of(result: Found) -> Any:
    return report.group(list(verdict.tables(SECTIONS, result.measurements)), result)


def test_a_missed_goal_is_red() -> None:
    console = Console(force_terminal=True, color_system="standard", width=160)
    with console.capture() as captured:
        console.print(shown_of(finished()))
    shown = captured.get()
    assert "\x1b[31mMPI / hbm shm zero-copy: mean 3.00" in shown
    assert "not measured: link: no network namespaces" in shown
    assert "110 ms (10.0 ms)" in shown


def test_the_plot_has_a_column_for_each_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.plot(finished(), tmp_path / "plot.png", PANELS)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_models_equal_the_papers() -> None:
    parameters = {name: round(model.bytes / 4e6, 1) for name, model in MODELS.items()}
    assert parameters == {
        "Inception_v1": 13.4, "Inception_v3": 24.7, "Resnet_50": 31.8,
        "Inception_resnet_v2": 56.1, "Resnet_152": 66.5, "VGG16": 138.4,
    }  # fmt: skip


def test_no_torch_is_needed_but_by_its_own_rival() -> None:
    script = (
        "import sys; "
        "import papers.async_sgd.__main__, papers.async_sgd.box_peer; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


MPI_AT_WORK = """
import sys, time
from benchmarks.processes import mpi_ranks
with mpi_ranks("papers.async_sgd.mpi_rank", 2, {}) as (server, worker):
    server.ask("prepare", size=1 << 20, workers=1)
    server.tell("serve", exchanges=1)  # by the worker, which gets no request
    print("at work", flush=True)
    time.sleep(60)
"""


def commands_with(word: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((process / "cmdline").read_text())
    return [command for command in found if word in command]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_of_mpi_end_with_the_benchmark(how: signal.Signals, socket_folder: Path) -> None:
    """The test finds the ranks by their commands, which name the benchmark's socket directory."""
    pytest.importorskip("mpi4py")
    environ = os.environ | {"TMPDIR": str(socket_folder)}
    command = [sys.executable, "-c", MPI_AT_WORK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == b"at work\n"
        assert len(commands_with(f"{socket_folder}/")) >= 2
        benchmark.send_signal(how)
        deadline = time.monotonic() + 20
        while commands_with(f"{socket_folder}/") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not commands_with(f"{socket_folder}/")
