"""papers.report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from papers.report import page
from papers.report.__main__ import EXPERIMENTS, contents, measure
from papers.report.connections import CONNECTIONS
from papers.report.containers import CONTAINERS
from papers.report.dropping import TABLE_1
from papers.report.experiment import Run
from papers.report.memory_box import ASYNC_SGD, CLIENTS
from papers.report.nodes import NODES
from papers.report.verdicts import PAPERS, Outcome, Verdict
from torch_hbmcomm.bench.result import Measurement, Result, sampled

ROOT = Path(__file__).resolve().parents[3]
RECORDS = ROOT / "papers" / "records"
MACHINE = {"cpu": "a processor", "cores": 2, "torch": "2", "time": "now"}
UNRECORDED = {"threshold", "layer-drop-seeds", "layer-drop-variants", "layer-drop-ways"}
"""The experiments that no committed record is of."""
PARTLY_RECORDED = {"processes", "containers"}
"""The experiments of which some runs have no committed record."""
INCOMPLETE = {"Fig. 1"}
"""The claims whose committed record lacks a figure."""


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
        "b with 2 workers: exposed communication 10.0, 50.0 ms (hbm shm, MPI).",
        "c with 2 workers: exposed communication 0.5, 70.0 ms (hbm shm, MPI).",
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
    ratios = ["1.10", "1.00", "0.90", "4.00", "4.50", "1.01, 3.53, 3.71"]
    assert [list(row) for row in CONTAINERS.table({"containers": result}).rows] == [
        ["allreduce", "float32", "1 MiB", "hbm", "2.00", *ratios]
    ]
    assert "Two containers take 2.62 to 6.99" in CONTAINERS.claims[1].finding
    assert "four 3.24 to 7.83 times" in CONTAINERS.claims[1].finding


@dataclass(frozen=True)
class Line:
    """A line of the table of verdicts."""

    paper: str
    item: str
    finding: str
    here: str
    verdict: str
    reason: str
    section: str


def lines_of(text: str) -> list[Line]:
    """Return the table of verdicts of a page."""
    _, table = text.split("| --- | --- | --- | --- | --- | --- | --- |\n", 1)
    rows = table.split("\n\n", 1)[0].splitlines()
    return [Line(*row.removeprefix("| ").removesuffix(" |").split(" | ")) for row in rows]


def page_of_records() -> str:
    return page.markdown(contents(RECORDS), {}, quick=False)


def test_every_experiment_has_claims() -> None:
    assert [name for name, one in EXPERIMENTS.items() if not one.claims] == []
    claims = [claim for one in EXPERIMENTS.values() for claim in one.claims]
    assert {claim.paper for claim in claims} == set(PAPERS)
    items = [(claim.paper, claim.item) for claim in claims]
    assert len(set(items)) == len(items)
    assert all(callable(claim.outcome) for claim in claims if claim.rule)


@pytest.mark.parametrize("failed", [False, True])
def test_links_of_the_table_lead_to_sections(tmp_path: Path, failed: bool) -> None:
    """A failed experiment has a section of its own; the others share "Not measured yet"."""
    runs = [run for one in EXPERIMENTS.values() for run in one.runs]
    failures = {run.name: "no memory" for run in runs} if failed else {}
    text = page.write(tmp_path, contents(tmp_path), failures, quick=False).read_text()
    claims = [claim for one in EXPERIMENTS.values() for claim in one.claims]
    lines = lines_of(text)
    assert {(one.paper, one.item) for one in lines} == {
        (claim.paper.short, claim.item) for claim in claims
    }
    html = (tmp_path / "report.html").read_text()
    links = re.findall(r'<a href="#(.+?)"', html)
    assert len(links) == len(lines)
    assert set(links) <= set(re.findall(r'<h2 id="(.+?)"', html))
    assert ("not-measured-yet" in links) != failed


def test_sections_repeat_the_table() -> None:
    text = page_of_records()
    for line in lines_of(text):
        name = re.fullmatch(r"\[(.+)\]\(#.+\)", line.section)
        assert name
        if name[1] in UNRECORDED:
            assert line.section.endswith("](#not-measured-yet)")
            assert f"\n- {name[1]}, " in text.split("\n## Not measured yet\n")[1]
            continue
        section = text.split(f"\n## {name[1]}: ")[1].split("\n## ")[0]
        repeated = [f"- **{line.paper}, {line.item}: {line.verdict.strip('*')}.**"]
        repeated += [f"The paper: {line.finding}"]
        repeated += [f"Here: {line.here}"] if line.here != "-" else []
        assert " ".join([*repeated, line.reason]) in section.split("\nVerdicts:\n")[1]


def test_claims_have_a_verdict_in_the_records() -> None:
    """A claim that no program measures is an exception, and so is one that awaits a record."""
    for experiment, results in contents(RECORDS):
        missing = {run.name for run in experiment.runs} - set(results)
        assert bool(missing) == (experiment.name in UNRECORDED | PARTLY_RECORDED)
        assert (missing != set() and not results) == (experiment.name in UNRECORDED)
        for claim in experiment.claims:
            found = experiment.outcome(claim, results, quick=False)
            unmeasured = found.verdict is Verdict.NOT_MEASURED
            awaited = not experiment.measured(claim, results) or claim.item in INCOMPLETE
            assert unmeasured == awaited or found is claim.outcome, (claim.item, found.reason)
            assert found.reason.endswith("."), claim.item


def changed(result: Result, first: int) -> Result:
    """Return a result in which every figure differs, adjacent ones by different factors.

    first: chooses the first measurement's factor.
    """

    def other(place: int, one: Measurement) -> Measurement:
        factor = 2.0 + (first + place) % 7
        of = {**one.of, "mode": "another"} if "mode" in one.of else dict(one.of)
        if "compute_ms" in of:
            of["compute_ms"] /= factor
        summary = one.samples and replace(
            one.samples,
            median=one.samples.median * factor,
            maximum=one.samples.maximum * factor**2,
        )
        values = {name: (factor + k) * value for k, (name, value) in enumerate(one.values.items())}
        curves = {name: [factor * value for value in these] for name, these in one.curves.items()}
        return replace(one, of=of, samples=summary, values=values, curves=curves)

    return replace(result, measurements=[other(*one) for one in enumerate(result.measurements)])


def test_changed_figures_change_the_sentences() -> None:
    for experiment, results in contents(RECORDS):
        others = {name: changed(result, k) for k, (name, result) in enumerate(results.items())}
        for claim in experiment.claims:
            awaited = not experiment.measured(claim, results) or claim.item in INCOMPLETE
            if callable(claim.outcome) and not awaited:
                assert claim.outcome(results).here != claim.outcome(others).here, claim.item


def containers_at(ratio: float) -> dict[str, Result]:
    of = {"collective": "allreduce", "bytes": 1 << 20}
    measured = [sampled(of, who, (us,)) for who, us in (("host", 1.0), ("1 container", ratio))]
    return {"containers": Result("containers", MACHINE, {}, measurements=measured)}


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.05, Verdict.HOLDS), (0.5, Verdict.IN_PART), (1.5, Verdict.FAILS)],
)
def test_a_verdict_follows_from_the_ratio(ratio: float, verdict: Verdict) -> None:
    found = CONTAINERS.outcome(CONTAINERS.claims[0], containers_at(ratio), quick=False)
    assert found.verdict is verdict
    assert f"{ratio:.2f} to {ratio:.2f} times" in found.here
    assert "each figure is a single sample" in found.reason


def test_a_missing_figure_leaves_a_claim_without_a_verdict() -> None:
    found = CONTAINERS.outcome(CONTAINERS.claims[1], containers_at(1.0), quick=False)
    assert found.verdict is Verdict.NOT_MEASURED
    assert "2 containers apart" in found.reason


APART = ("2 containers apart", "4 containers apart")


def mpi_in_containers(
    buffers: float = 1.0, together: float = 1.0, apart: float = 2.0
) -> dict[str, Result]:
    """Return records of C, buffers and objects in all collectives and both types.

    buffers: the time of a broadcast of buffers over C's in several containers.
    together, apart: the time in one container and in several containers over the host's.
    """
    times = {"host": 1.0, "1 container": together, **dict.fromkeys(APART, apart)}
    found = {"containers-mpi": "float32", "containers-mpi-int32": "int32"}
    return {
        name: Result(
            "containers",
            MACHINE,
            {},
            measurements=[
                sampled(
                    {"collective": collective, "dtype": dtype, "bytes": 1 << 20, "series": series},
                    where,
                    (us * (buffers if behind and where in APART else 1.0),),
                )
                for collective in ("broadcast", "gather", "allreduce")
                for series in ("mpi-c-in-place", "mpich", "mpi-objects")
                for behind in [collective == "broadcast" and series == "mpich"]
                for where, us in times.items()
            ],
        )
        for name, dtype in found.items()
    }


def outcome_in_containers(item: str, results: Mapping[str, Result]) -> Outcome:
    [claim] = [one for one in CONTAINERS.claims if one.item.startswith(item)]
    return CONTAINERS.outcome(claim, results, quick=False)


@pytest.mark.parametrize(
    ("buffers", "verdict"),
    [(1.2, Verdict.HOLDS), (1.05, Verdict.FAILS), (0.5, Verdict.FAILS)],
)
def test_buffers_fall_behind_c_only_in_broadcasts_in_several_containers(
    buffers: float, verdict: Verdict
) -> None:
    found = outcome_in_containers("Figs. 8c and 8d", mpi_in_containers(buffers))
    assert found.verdict is verdict
    assert f"takes {buffers:.2f} times the time of C ({buffers:.2f} to" in found.here
    assert "in one container 1.00 times the time of C (1.00 to 1.00 over 4 cells)" in found.here
    assert "C's collectives take 2.00 to 2.00 times the host's time in two" in found.here


def test_buffers_that_fall_behind_c_in_one_type_are_a_part() -> None:
    results = mpi_in_containers(1.2) | {
        name: result for name, result in mpi_in_containers(1.0).items() if "int32" in name
    }
    found = outcome_in_containers("Figs. 8c and 8d", results)
    assert found.verdict is Verdict.IN_PART


@pytest.mark.parametrize(
    ("together", "apart", "in_one", "in_several"),
    [
        (1.05, 1.5, Verdict.HOLDS, Verdict.HOLDS),
        (0.5, 1.05, Verdict.IN_PART, Verdict.FAILS),
        (1.5, 1.0, Verdict.FAILS, Verdict.FAILS),
    ],
)
def test_series_of_mpi_are_compared_with_the_host(
    together: float, apart: float, in_one: Verdict, in_several: Verdict
) -> None:
    results = mpi_in_containers(1.0, together, apart)
    one = outcome_in_containers("Table 5, one container, with MPI", results)
    several = outcome_in_containers("Table 5, two and four containers, with MPI", results)
    assert (one.verdict, several.verdict) == (in_one, in_several)
    for name in ("mpi-c-in-place", "mpich", "mpi-objects"):
        assert f"{name} {together:.2f} to {together:.2f}" in one.here
        span = f"{apart:.2f} to {apart:.2f}"
        assert f"{name} {span} and {span}" in several.here


def test_claims_need_their_own_runs_alone() -> None:
    results = mpi_in_containers(1.2)
    hbm = outcome_in_containers("Table 5, one container; ", results)
    assert hbm.verdict is Verdict.NOT_MEASURED
    assert "python -m papers.report --full --only containers" in hbm.reason
    for missing in results:
        left = {name: result for name, result in results.items() if name != missing}
        behind = outcome_in_containers("Figs. 8c and 8d", left)
        assert behind.verdict is Verdict.NOT_MEASURED


def test_each_series_and_type_has_a_line_and_a_panel() -> None:
    results = mpi_in_containers()
    rows = CONTAINERS.table(results).rows
    series = ("mpi-c-in-place", "mpich", "mpi-objects")
    assert [(row[0], row[1], row[3]) for row in rows] == list(
        product(("broadcast", "gather", "allreduce"), ("float32", "int32"), series)
    )
    assert {tuple(row[5:10]) for row in rows} == {("1.00", "-", "-", "2.00", "2.00")}
    panels = {panel.title: panel for panel in CONTAINERS.panels(results)}
    assert set(panels) == {f"{name}, {dtype}" for name in series for dtype in ("float32", "int32")}
    for panel in panels.values():
        assert {len(bars) for bars in panel.bars.values()} == {len(panel.labels)} == {3}
        assert set(panel.bars) == {"1 container", *APART}


def test_quick_runs_have_no_verdicts() -> None:
    lines = lines_of(page.markdown(contents(RECORDS), {}, quick=True))
    constant = {
        (claim.paper.short, claim.item)
        for one in EXPERIMENTS.values()
        for claim in one.claims
        if isinstance(claim.outcome, Outcome)
    }
    for line in lines:
        if (line.paper, line.item) not in constant:
            assert line.verdict == "**not measured yet**"
            assert "python -m papers.report --full --only" in line.reason
            assert line.here == "-"
