"""The committed page of the papers' figures, its sections, and benchmarks of this page alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import programs
from papers.connections.__main__ import THREADS, Thread, each_thread, summary
from papers.connections.__main__ import app as connections
from papers.images.__main__ import app as images
from papers.images.alexnet import CLASSES, SHAPE, alexnet
from papers.images.rank import ALONE, HBM, MPI
from papers.report import page
from papers.report.__main__ import EXPERIMENTS, contents
from papers.report.dropping import TRAINING
from papers.report.experiment import Label
from papers.report.images import IMAGES
from papers.report.memory_box import CLIENTS
from papers.report.messages import MESSAGES_OVER_CONNECTIONS, crossover
from papers.report.placement import MEMORY_SPEED
from papers.report.processes import PROCESSES
from papers.report.verdicts import Outcome, Verdict
from torch_hbmcomm.bench.result import Measurement, Result, sampled

PAPERS = Path(__file__).resolve().parents[3] / "papers" / "records"
MACHINE = {"cpu": "a processor", "cores": 2, "torch": "2", "time": "now"}


def result(benchmark: str, measured: list[Measurement], **more: Any) -> Result:
    return Result(benchmark, MACHINE, {}, measurements=measured, **more)


def written(file: Path, app: Any, *arguments: str) -> dict[str, Any]:
    """Run a benchmark, and return its JSON."""
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, f"--json={file}"])
    assert ended.exit_code == 0, ended.output
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_committed_page_matches_the_committed_json() -> None:
    drawn = page.markdown(contents(PAPERS), {}, quick=False)
    assert (PAPERS / "report.md").read_text() == drawn, (
        "draw it again: python -m papers.report --full --only memory-speed --folder papers/records"
    )


def test_the_committed_json_belongs_to_runs() -> None:
    runs = {run.name for experiment in EXPERIMENTS.values() for run in experiment.runs}
    files = {file.stem for file in PAPERS.glob("*.json")}
    assert files, f"{PAPERS} has no results"
    assert files <= runs


def test_unmeasurable_parts_are_listed_with_the_reason(tmp_path: Path) -> None:
    text = page.markdown(contents(tmp_path), {}, quick=True)
    assert f"## {MEMORY_SPEED.name}" in text
    assert "**Not measurable here.**" in text
    assert "| Fig. 11, Tables 6 and 7 |" in text
    for experiment in EXPERIMENTS.values():
        assert bool(experiment.runs) != (experiment.label is Label.NOT_MEASURABLE)


def test_unmeasured_parts_come_at_the_end(tmp_path: Path) -> None:
    text = page.markdown(contents(tmp_path), {}, quick=False)
    _, end = text.split("## Not measured yet")
    for experiment in EXPERIMENTS.values():
        command = f"`python -m papers.report --full --only {experiment.name}`"
        assert (command in end) == bool(experiment.runs)
    assert "yet" not in page.markdown([(MEMORY_SPEED, {})], {}, quick=False)


def test_a_run_of_a_checkout_names_its_commit() -> None:
    machine = MACHINE | {"commit": "0123456789abcdef", "modified": []}
    text = page.markdown([(PROCESSES, {"small-2": Result("collectives", machine, {})})], {}, False)
    assert "\n- now, commit 0123456789ab: `python -m" in text


def test_unmeasured_runs_come_after_measured_ones() -> None:
    found = {"small-2": Result("collectives", MACHINE, {"ranks": 2})}
    text = page.markdown([(PROCESSES, found)], {"small-8": "no memory"}, quick=False)
    assert "([JSON](small-2.json))" in text
    assert "\n- Not measured: `small-8`: no memory" in text
    listed = [f"- not measured yet: `{run.command(False)}`" in text for run in PROCESSES.runs]
    assert listed == [run.name not in ("small-2", "small-8") for run in PROCESSES.runs]


def test_results_of_several_machines_are_distinguished() -> None:
    found = {
        name: Result("collectives", MACHINE | {"cpu": cpu}, {"ranks": 2})
        for name, cpu in (("small-2", "a fast one"), ("small-8", "a slow one"))
    }
    text = page.markdown([(PROCESSES, found)], {}, quick=False)
    first, second = (
        page.markdown([(PROCESSES, {n: r})], {}, quick=False) for n, r in found.items()
    )
    assert "a fast one, 2 cores" in first and " on a fast one" not in first
    assert "\n- now on a fast one" in text and "\n- now on a slow one" in text
    assert "a slow one" in second


def test_unmeasured_contenders_are_listed() -> None:
    steps = [sampled({"where": "host", "ranks": 2}, "hbm", [8.0], "ms")]
    found = {"images": result("images", steps, unavailable={"containers": "no podman"})}
    text = page.markdown([(IMAGES, found)], {}, quick=False)
    assert "- Not measured: containers: no podman" in text


def test_low_sizes_with_many_processes_have_own_panels() -> None:
    def run(ranks: int, size: int) -> Result:
        of = {"collective": "broadcast", "dtype": "float32", "bytes": size}
        found = [sampled(of, "hbm-zero-copy", [1000.0])]
        return Result("collectives", MACHINE, {"ranks": ranks}, measurements=found)

    results = {"whole-2": run(2, 1 << 28), "small-64": run(64, 1 << 20), "small-2": run(2, 1 << 20)}
    panels = {panel.title: panel.lines["hbm-zero-copy"][0] for panel in PROCESSES.panels(results)}
    assert panels == {"broadcast, float32": [2], "broadcast of 1 MiB, float32": [2, 64]}
    assert [row[1:3] for row in PROCESSES.table(results).rows] == [
        ["2", "1 MiB"], ["2", "256 MiB"], ["64", "1 MiB"],
    ]  # fmt: skip


def test_series_of_processes_are_relative_to_c() -> None:
    def run(ranks: int, **times: float) -> Result:
        of = {"collective": "broadcast", "dtype": "float32", "bytes": 1024}
        found = [sampled(of, name.replace("_", "-"), [time]) for name, time in times.items()]
        return Result("collectives", MACHINE, {"ranks": ranks}, measurements=found)

    results = {
        "whole-2": run(2, mpi_c_in_place=2.0, mpich=4.0, hbm_staged=1.0),
        "whole-4": run(4, mpi_c_in_place=1.0, mpich=3.0),
        "whole-8": run(8, mpich=3.0),
    }
    [buffers] = [one for one in PROCESSES.claims if one.item == "Fig. 8, host, DDR4"]
    assert callable(buffers.outcome)
    assert buffers.outcome(results).here == (
        "In DDR, broadcast of buffers is slower than C: 2.50 times the time of C"
        " (2.00 to 3.00 over 2 cells)."
    )


def test_both_types_of_processes_are_shown_and_judged() -> None:
    def run(dtype: str, **times: float) -> Result:
        of = {"collective": "allreduce", "dtype": dtype, "bytes": 1024}
        found = [sampled(of, name.replace("_", "-"), [time]) for name, time in times.items()]
        return Result("collectives", MACHINE, {"ranks": 2}, measurements=found)

    results = {
        "whole-2": run("float32", mpi_c_in_place=1.0, mpich=2.0),
        "whole-2-int32": run("int32", mpi_c_in_place=1.0, mpich=4.0),
    }
    assert [row[:4] for row in PROCESSES.table(results).rows] == [
        ["allreduce", "2", "1 KiB", dtype] for dtype in ("float32", "int32")
    ]
    assert [panel.title for panel in PROCESSES.panels(results)] == [
        "allreduce, float32", "allreduce, int32",
    ]  # fmt: skip
    [buffers] = [one for one in PROCESSES.claims if one.item == "Fig. 10, host, DDR4"]
    assert callable(buffers.outcome)
    assert "3.00 times the time of C (2.00 to 4.00 over 2 cells)" in buffers.outcome(results).here


def test_objects_of_another_size_have_a_line_without_ratios() -> None:
    found = [
        sampled({"collective": "broadcast", "dtype": "int32", "bytes": size}, name, [1000.0])
        for name, size in (("hbm-zero-copy", 1 << 28), ("mpich", 1 << 28), ("mpi-objects", 1 << 26))
    ]
    results = {"alone-32-int32": Result("processes", MACHINE, {"ranks": 32}, measurements=found)}
    objects, others = PROCESSES.table(results).rows
    assert [objects[2], *objects[9:]] == ["64 MiB", "1", "-", "-", "-"]
    assert [others[2], *others[9:]] == ["256 MiB", "-", "-", "1.0", "-"]


def test_every_run_of_processes_is_repeated_with_integers() -> None:
    runs = {run.name: run for run in PROCESSES.runs}
    floats = {name: run for name, run in runs.items() if not name.endswith("-int32")}
    assert len(runs) == 2 * len(floats)
    for name, run in floats.items():
        other = runs[f"{name}-int32"]
        assert other.arguments == [*run.arguments, "--dtype=int32"]
        assert other.quick == [*run.quick, "--dtype=int32"]


def thread(operations: float, mean: float, maximum: float = 9.0) -> Thread:
    return Thread(operations, 0.5, 1.0, mean, 4.0, maximum)


def test_threads_are_summed_over_their_windows() -> None:
    windows = [[thread(100, 2.0), thread(300, 6.0)], [thread(100, 2.0), thread(100, 4.0, 50.0)]]
    found = summary(windows, 1000)
    assert found["gb_s"] == pytest.approx((800e3 + 400e3) / 2 / 1e9)
    assert found["mean_us"] == pytest.approx((100 * 2 + 300 * 6 + 100 * 2 + 100 * 4) / 600)
    assert (found["min_us"], found["p99_us"], found["max_us"]) == (1.0, 4.0, 50.0)
    assert found["uneven"] == 2.5
    assert each_thread(windows)["mean_us"] == [2.0, 5.0]


def message(transport: str, size: int, mean: float, count: int = 1, **of: Any) -> Measurement:
    names = {"section": "connections", "operation": "read", "bytes": size, "count": count, **of}
    values = {"gb_s": size / mean / 1e3, "min_us": 1.0, "mean_us": mean, "p99_us": 5.0}
    return Measurement(names, f"hbm {transport}", values=values | {"max_us": 9.0, "uneven": 1.0})


def test_rma_overtakes_messages_where_it_stays_faster() -> None:
    times = {64: (2.0, 1.0), 256: (2.0, 3.0), 1024: (4.0, 3.0), 4096: (9.0, 3.0)}
    found = [
        message(transport, size, mean)
        for size, both in times.items()
        for transport, mean in zip(("tcp", "shm"), both, strict=True)
    ]
    assert crossover(found, "read") == 1024
    found += [message("tcp", 1 << 20, 1.0), message("shm", 1 << 20, 2.0)]
    assert crossover(found, "read") is None


def test_all_clients_are_compared_with_their_bound() -> None:
    def took(section: str, contender: str, microseconds: float, share: float = 1.0) -> Measurement:
        of = {"section": section, "operation": "read", "bytes": 1 << 20, "clients": 2}
        return sampled(of, contender, [microseconds], values={"smallest_share": share})

    found = [took("clients", "hbm shm", 50.0, 0.9), took("clients", "memcpy", 40.0)]
    found += [took("clients", "hbm tcp", 500.0)]
    found += [took("clients-link", "hbm tcp", 1e4), took("clients-link", "link", 9600.0)]
    assert CLIENTS.table({CLIENTS.name: result("box", found)}).rows == [
        ["shm", "2", "21 (80% of memcpy)", "0.90"],
        ["tcp, 1 Gbit/s", "2", "0.105 (96% of link)", "1.00"],
        ["tcp, loopback", "2", "2.1", "1.00"],
    ]


def test_the_findings_on_messages_are_answered() -> None:
    groups = (("connections", 1, 8.0), ("connections", 4, 2.0), ("threads", 4, 10.0))
    found = [
        message(transport, size, mean, count, section=section, operation="write")
        for transport in ("tcp", "shm")
        for size in (64, 512)
        for section, count, mean in groups
    ]
    found.append(message("tcp", 1 << 20, 8.0, operation="write"))
    found.append(message("tcp", 1 << 20, 4.0, 4, section="threads", operation="write"))
    for way, fastest in (("alone", 8.0), ("batch", 4.0), ("packed", 1.0)):
        one = message("tcp", 64, 9.0, section="aggregation", operation=way)
        found.append(replace(one, values={**one.values, "min_us": fastest}))
    results = {MESSAGES_OVER_CONNECTIONS.name: result("connections", found)}
    here = {
        claim.item.split(";")[0]: MESSAGES_OVER_CONNECTIONS.outcome(claim, results, False).here
        for claim in MESSAGES_OVER_CONNECTIONS.claims
    }
    aggregated = here["Fig. 2, finding 1"]
    assert "of 64 B together are 2 times (batch) or 8 times (packed) as fast" in aggregated
    assert "A write of 512 B takes 1.00 times the time of a write of 64 B." in aggregated
    assert here["Fig. 2, finding 2"] == (
        "4 threads reach 0.80 to 0.80 times one thread's throughput below 64 KiB, and 2.00 to 2.00"
        " times from there on."
    )
    for item in ("Fig. 2, finding 3", "Fig. 3, finding 6"):
        assert "With 4 connections the throughput is 4.00 times one connection's" in here[item]
    assert here["Fig. 3, finding 5"] == "", "shm has no large message"
    assert "the 99th percentile is 5.00 times the minimum" in here["Fig. 4, finding 7"]


@pytest.mark.skipif(
    programs.why_unavailable() is not None, reason="the native programs have not been built"
)
def test_messages_are_measured_over_connections_and_threads(tmp_path: Path) -> None:
    document = written(tmp_path / "out.json", connections, "--quick", "--counts=1,3")
    threads = [one for one in document["measurements"] if one["section"] == THREADS]
    assert {(one["contender"], one["operation"], one["count"]) for one in threads} == {
        (f"hbm {transport}", operation, 3)
        for transport in ("tcp", "shm")
        for operation in ("read", "write")
    }
    for one in document["measurements"]:
        values = one["values"]
        assert 0 < values["min_us"] <= values["mean_us"] <= values["max_us"]
        for points in one.get("curves", {}).values():
            assert len(points) == one["count"]

    results = {
        MESSAGES_OVER_CONNECTIONS.name: Result.from_json((tmp_path / "out.json").read_text())
    }
    table = MESSAGES_OVER_CONNECTIONS.table(results)
    assert {len(row) for row in table.rows} == {len(table.heading)}
    titles = [panel.title for panel in MESSAGES_OVER_CONNECTIONS.panels(results)]
    assert "read, hbm tcp" in titles and "read, one connection" in titles
    assert "read of 4 KiB, hbm shm,\neach of 3 connections" in titles
    here = {
        claim.item: MESSAGES_OVER_CONNECTIONS.outcome(claim, results, quick=False).here
        for claim in MESSAGES_OVER_CONNECTIONS.claims
    }
    assert here["Fig. 2, finding 3"].startswith("With 3 connections the throughput is")
    assert here["Fig. 2, finding 2"] == "", "a quick run has no large messages"


@pytest.mark.parametrize(
    "arguments", [["--transports=pigeon"], ["--counts=0"], ["--sizes=many"], ["--counts=two"]]
)
def test_impossible_connections_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(connections, arguments).exit_code == 2


def test_alexnet_has_its_parameters_and_classes() -> None:
    with torch.device("meta"):
        net = alexnet()
        assert net(torch.empty(2, *SHAPE)).shape == (2, CLASSES)
    assert sum(parameter.numel() for parameter in net.parameters()) == 61_100_840


@pytest.mark.full
def test_images_are_counted(tmp_path: Path) -> None:
    options = ["--ranks=2", "--rounds=1", "--steps=1", "--contained=0"]
    document = written(tmp_path / "out.json", images, *options)
    found = {one["contender"]: one for one in document["measurements"]}
    assert set(found) | set(document["unavailable"]) == {HBM, "gloo", ALONE, MPI}
    assert all(one["n"] == 1 for one in found.values())
    if MPI in found:  # the buckets of the last layers come first
        buckets = [16_388_000, 67_125_248, 151_011_328, 9_878_784]
        assert found[MPI]["curves"] == {"buckets_bytes": buckets}


def steps_of(ranks: int, where: str = "host", **times: float) -> list[Measurement]:
    """Return measured steps in ms by contender; "alone" and "mpi" are ALONE and MPI."""
    names = {"alone": ALONE, "mpi": MPI}
    of = {"where": where, "ranks": ranks}
    return [
        sampled(of, names.get(who, who), [ms], "ms", curves={"buckets_bytes": [2e6, 16_388_000]})
        for who, ms in times.items()
    ]


def test_images_are_compared_with_the_peers_and_the_bound() -> None:
    host = steps_of(4, hbm=8.0, gloo=16.0, alone=4.0, mpi=12.0)
    inside = steps_of(4, "1 container", hbm=8.0)
    found = {IMAGES.name: result("images", [*host, *inside])}
    assert [list(row) for row in IMAGES.table(found).rows] == [
        ["host", "4", *("4000.0", "2000.0", "2000.0", "8000.0"), *("2.00", "2.00", "0.50"),
         *("50 %", "75 %", "75 %")],
        ["1 container", "4", "4000.0", *9 * ["-"]],
    ]  # fmt: skip
    over_ranks, shares, divided = IMAGES.panels(found)
    assert over_ranks.lines["gloo"][1] == over_ranks.lines[MPI][1] == [2000.0]
    assert shares.lines[MPI] == ([4], [0.75], "-") and ALONE not in shares.lines
    assert divided.bars == {"hbm": [4000.0]}


def outcomes_of_images(measured: list[Measurement], **plan: Any) -> list[Outcome]:
    found = {IMAGES.name: Result("images", MACHINE, plan, measurements=measured)}
    return [IMAGES.outcome(claim, found, quick=False) for claim in IMAGES.claims]


def test_images_are_judged_by_mpi() -> None:
    few = steps_of(2, hbm=5.0, gloo=6.0, alone=4.0, mpi=1.0)
    many = steps_of(8, hbm=5.0, gloo=5.0, alone=4.0, mpi=3.0)
    against, over, _ = outcomes_of_images([*few, *many], net="AlexNet")
    assert against.verdict is over.verdict is Verdict.HOLDS
    assert against.here == (
        "hbm changes the images a second by +0.0 % to +20.0 % compared with Gloo, and by +0.0 % to"
        " +40.0 % compared with MPI in C. The share of communication in a step is 20 % to 20 % with"
        " hbm, 20 % to 33 % with Gloo, 20 % to 43 % with MPI in C."
    )
    assert over.here == (
        "The gain over Gloo is +20.0 % with 2 ranks and +0.0 % with 8, and the gain over MPI in C"
        " is +0.0 % with 2 ranks and +40.0 % with 8."
    )
    assert against.reason.startswith("AlexNet learns") and "not measured" not in against.reason


def test_a_record_without_mpi_says_so() -> None:
    few = steps_of(2, hbm=5.0, gloo=6.0, alone=4.0)
    many = steps_of(8, hbm=5.0, gloo=7.0, alone=4.0)
    against, over, _ = outcomes_of_images([*few, *many])
    assert against.verdict is over.verdict is Verdict.IN_PART
    for found in (against, over):
        assert "MPI in C" not in found.here
        assert found.reason.endswith(" MPI in C: not measured.")


def test_a_record_without_peers_has_no_verdict_on_them() -> None:
    against, over, _ = outcomes_of_images(steps_of(2, hbm=5.0, alone=4.0))
    assert against.verdict is over.verdict is Verdict.NOT_MEASURED


def test_the_net_and_its_buckets_are_told() -> None:
    found = Result(
        "images", MACHINE, {"net": "AlexNet"}, measurements=steps_of(2, hbm=5.0, mpi=1.0)
    )
    assert IMAGES.answer({IMAGES.name: found}) == [
        "AlexNet learns random images; DDP's buckets have 2.0, 16.4 MB."
    ]


def test_a_training_that_is_never_as_good_says_so() -> None:
    values = {"bytes_share": 0.1, "iteration_share": 0.2, "loss": 0.5, "accuracy": 91.0}
    values |= {"points": -2.0, "seconds": 12.0}
    curves = {name: [1.0] for name in ("steps", "seconds", "loss", "accuracy")}
    of = {"section": "server-training", "case": "1 Gbit/s, SGD"}
    found = {
        TRAINING.name: result(
            "layer_drop", [Measurement(of, "R = 0.9", values=values, curves=curves)]
        )
    }
    [row] = TRAINING.table(found).rows
    assert list(row[2:]) == ["10.0%", "20.0%", "0.500", "91.00", "-2.00", "12.0", "never"]
    assert len(TRAINING.panels(found)) == 4


def test_trainings_of_one_case_share_its_panels() -> None:
    def run(*contenders: str) -> Result:
        curves = {name: [1.0] for name in ("steps", "seconds", "loss", "accuracy")}
        values = dict.fromkeys(("bytes_share", "iteration_share", "loss", "points"), 1.0)
        values |= {"accuracy": 90.0, "seconds": 2.0}
        of = {"section": "server-training", "case": "1 Gbit/s, SGD"}
        return result(
            "layer_drop", [Measurement(of, who, values=values, curves=curves) for who in contenders]
        )

    runs = [one.name for one in TRAINING.runs]
    found = {runs[0]: run("all is sent", "R = 0.9"), runs[1]: run("all is sent", "R = 0.95")}
    assert [row[1] for row in TRAINING.table(found).rows] == ["all is sent", "R = 0.9", "R = 0.95"]
    assert [list(panel.lines) for panel in TRAINING.panels(found)] == 4 * [
        ["all is sent", "R = 0.9", "R = 0.95"]
    ]
