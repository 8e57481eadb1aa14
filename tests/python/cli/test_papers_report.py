"""papers.report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from papers.report import page
from papers.report.__main__ import EXPERIMENTS, contents, measure
from papers.report.connections import CONNECTIONS
from papers.report.containers import CONTAINERS, PAPER
from papers.report.dropping import TABLE_1
from papers.report.experiment import Run
from papers.report.memory_box import ASYNC_SGD, CLIENTS
from papers.report.nodes import NODES
from torch_hbmcomm.bench.result import Measurement, Result, sampled

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"cpu": "a processor", "cores": 2, "torch": "2", "time": "now"}


def report(folder: Path, only: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "papers.report", f"--folder={folder}", f"--only={only}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.full
def test_a_report_measures_parts_without_json(tmp_path: Path) -> None:
    first = report(tmp_path, "box-clients")
    assert first.returncode == 0, first.stderr
    file = tmp_path / "box-clients.json"
    measured = file.stat().st_mtime_ns
    text = (tmp_path / "report.md").read_text()
    measurements = json.loads(file.read_text())["measurements"]
    assert {one["clients"] for one in measurements} == {2, 4}
    for one in measurements:
        way = "tcp, 1 Gbit/s" if one["section"] == "clients-link" else "shm"
        assert f"| {way} | {one['clients']} |" in text
    assert "<table>" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "box-clients.png").exists()

    assert f"`{CLIENTS.runs[0].command(quick=True)}`" in text
    assert text == page.markdown(contents(tmp_path), {}, quick=True), "made from the JSON alone"

    again = report(tmp_path, "box-clients")
    assert again.returncode == 0, again.stderr
    assert file.stat().st_mtime_ns == measured


def test_an_unknown_experiment_is_named(tmp_path: Path) -> None:
    refused = report(tmp_path, "box-clients,horoscope")
    assert refused.returncode == 2
    assert "horoscope" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_failed_run_leaves_only_a_reason(tmp_path: Path) -> None:
    run = Run("bad", "benchmarks.box", [], ["--sections=horoscope"])
    cause = measure(run, quick=True, file=tmp_path / "bad.json")
    assert cause is not None
    assert "horoscope" in cause
    assert not list(tmp_path.iterdir())

    failures = {ASYNC_SGD.runs[0].name: cause}
    text = page.write(tmp_path, [(ASYNC_SGD, {})], failures, quick=True).read_text()
    assert f"Not measured: `{ASYNC_SGD.name}`: {cause}" in text


def turn(model: str, contender: str, ms: float) -> Measurement:
    of: Mapping[str, Any] = {
        "section": "node",
        "scenario": "sequential",
        "model": model,
        "workers": 2,
    }
    return sampled(of, contender, (ms,), unit="ms")


def test_ratios_are_of_the_medians_of_each_cell() -> None:
    measured = [
        turn(model, contender, ms)
        for model, ours, theirs in (("a", 2, 4), ("b", 1, 3), ("c", 2, 20))
        for contender, ms in (("hbm shm", ours), ("MPI", theirs))
    ]
    measured.append(turn("d", "MPI", 5))  # no cell: the box was not measured there
    result = Result("async_sgd", MACHINE, {}, measurements=measured)
    rows = ASYNC_SGD.table({ASYNC_SGD.name: result}).rows
    assert list(rows[0]) == ["sequential", "3", "3.00", "5.00", "2.00 to 10.00", "2 of 3"]


def test_a_peer_that_sleeps_has_ratios_of_its_own() -> None:
    peers = {"hbm shm": 2.0, "MPI": 8.0, "MPI sleeping": 3.0}
    measured = [turn("a", contender, ms) for contender, ms in peers.items()]
    result = Result("async_sgd", MACHINE, {}, measurements=measured)
    rows = ASYNC_SGD.table({ASYNC_SGD.name: result}).rows
    assert [list(row) for row in rows] == [
        ["sequential", "1", "4.00", "4.00", "4.00 to 4.00", "1 of 1"],
        ["sequential, MPI sleeping", "1", "1.50", "1.50", "1.50 to 1.50", "0 of 1"],
    ]


def test_unhidden_communication_is_shown() -> None:
    def iteration(model: str, contender: str, ms: float) -> Measurement:
        of = {"section": "node", "scenario": "parallel", "model": model, "workers": 2}
        return sampled(of | {"compute_ms": 100.0}, contender, (ms,), unit="ms")

    measured = [
        iteration(model, contender, ms)
        for model, ours, theirs in (("a", 100.2, 100.5), ("b", 110.0, 150.0), ("c", 100.5, 170.0))
        for contender, ms in (("hbm shm", ours), ("MPI", theirs))
    ]
    result = Result("async_sgd", MACHINE, {}, measurements=measured)
    assert list(ASYNC_SGD.answer({ASYNC_SGD.name: result})) == [
        "Parallel, cells of 3 with more than 1 ms of exposed communication: "
        "1 with hbm shm, 2 with MPI.",
        "b with 2 workers: exposed communication 10.0, 50.0 ms (hbm shm, MPI).",
        "c with 2 workers: exposed communication 0.5, 70.0 ms (hbm shm, MPI).",
        "All scenarios, cells of 3 with a single sample: 3 with hbm shm, 3 with MPI.",
    ]


def test_communication_that_is_less_than_nothing_is_not_shown() -> None:
    measured = [
        Measurement({"case": "1 Gbit/s"}, who, values={"time_share": share, "bytes_share": 0.25})
        for who, share in (("R = 0.9", 0.5), ("R = 0.99", -2.42))
    ]
    result = Result("layer_drop", MACHINE, {}, measurements=measured)
    assert [list(row) for row in TABLE_1.table({TABLE_1.name: result}).rows] == [
        ["1 Gbit/s", "R = 0.9", "-50.0%", "-", "-75.0%"],
        ["1 Gbit/s", "R = 0.99", "-", "-", "-75.0%"],
    ]


def test_a_report_has_the_links_that_its_words_name() -> None:
    for run in NODES.runs:
        assert "--rate=200mbit" in run.quick
        assert "--rate=200mbit" in run.arguments and "--rate=1gbit" in run.arguments
    assert "200 Mbit/s and 1 Gbit/s" in NODES.differs


def test_connections_are_compared() -> None:
    of = {"section": "tcp", "operation": "read", "bytes": 1 << 20, "clients": 1}
    results = {
        run.name: Result(
            "box",
            MACHINE,
            {},
            measurements=[
                sampled(of, "hbm tcp", [us, us, 3 * us]),
                sampled(of, "sockets", [us / 5]),
            ],
        )
        for run, us in zip(CONNECTIONS.runs[:2], (1048.576, 524.288), strict=True)
    }
    [row] = CONNECTIONS.table(results).rows
    assert list(row) == ["read", "1 MiB", "1.00 (20%, 3.0)", "2.00 (20%, 3.0)", *"---"]
    [panel] = CONNECTIONS.panels(results)
    assert list(panel.lines) == ["connections: 1", "connections: 2"]


def test_names_of_runs_differ() -> None:
    names = [run.name for experiment in EXPERIMENTS.values() for run in experiment.runs]
    assert len(set(names)) == len(names)


def test_containers_are_compared_with_host_and_paper() -> None:
    of = {"collective": "allreduce", "bytes": 1 << 20}
    times = {
        "host": 2000.0, "1 container": 2200.0, "2 containers": 2000.0, "4 containers": 1800.0,
        "2 containers apart": 8000.0, "4 containers apart": 9000.0,
    }  # fmt: skip
    measured = [sampled(of, who, (us,)) for who, us in times.items()]
    result = Result("containers", MACHINE, {}, measurements=measured)
    assert [list(row) for row in CONTAINERS.table({"containers": result}).rows] == [
        ["allreduce", "1 MiB", "2.00", "1.10", "1.00", "0.90", "4.00", "4.50", "1.01, 3.53, 3.71"]
    ]
    ratios = [time / host for host, *others in PAPER.values() for time in others]
    assert f"{min(ratios[1::3]):.1f} to {max(ratios[1::3]):.1f}" in CONTAINERS.found[0]
    assert f"{min(ratios[2::3]):.1f} to {max(ratios[2::3]):.1f}" in CONTAINERS.found[0]
