"""Collectives by the nodes' leaders: Panda 2019, multi-leader and hierarchical designs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.collectives.layouts import WITHOUT, Layout
from benchmarks.collectives.nodes import LINK, table
from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.report.experiment import Experiment, Label, Run
from papers.report.verdicts import (
    EQUAL,
    PANDA,
    Claim,
    Outcome,
    Spread,
    graded,
    percent,
    samples,
)
from torch_hbmcomm.bench.report import Row, rows
from torch_hbmcomm.bench.result import Result

_LAYOUTS = ("2x2", "2x4", "3x1", "4x2", "3+1")
_RATES = ("200mbit", "1gbit")
_SIZES = (4, 64)  # MiB


def _table(results: Mapping[str, Result]) -> Table:
    tables = [table(result) for result in results.values()]
    return Table(tables[0].heading, [row for one in tables for row in one.rows])


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    """Draw a panel for each layout and rate, with the largest tensors."""
    panels: dict[str, Panel] = {}
    for result in results.values():
        found = list(rows(result.measurements))
        largest = max(row[LINK].of["mib"] for row in found)
        for row in found:
            of, link = row[LINK].of, row[LINK].median
            if of["mib"] != largest:
                continue
            title = f"{of['layout']}, {of['rate']}, {largest} MiB"
            panel = panels.setdefault(title, Panel(title, y="time / the link's bound"))
            panel.labels = [*panel.labels, of["collective"].replace("_", "\n", 1)]
            for name in ("hbm", WITHOUT, "gloo"):
                if name in row:
                    panel.bars.setdefault(name, []).append(row[name].median / link)
    return list(panels.values())


def _below(results: Mapping[str, Result]) -> list[str]:
    """Return how far the times of hbm are below the links' bounds, by the size of the tensors."""
    least: dict[int, float] = {}
    for result in results.values():
        for row in rows(result.measurements):
            if {LINK, "hbm"} <= set(row):
                mib, ratio = row[LINK].of["mib"], row["hbm"].median / row[LINK].median
                least[mib] = min(ratio, least.get(mib, ratio))
    return [
        f"Times of hbm at {mib} MiB are below the bound by up to {percent(1 - ratio)}."
        for mib, ratio in sorted(least.items())
        if ratio < 1
    ]


def _leaders(results: Mapping[str, Result]) -> Outcome:
    found = [
        row
        for result in results.values()
        for row in rows(result.measurements)
        if {LINK, "hbm", "gloo"} <= set(row) and row[LINK].of["collective"] == "all_reduce"
    ]
    bound = Spread.of([row["hbm"].median / row[LINK].median for row in found], "hbm and the links")
    gloo = Spread.of([row["gloo"].median / row["hbm"].median for row in found], "gloo and hbm")
    return Outcome(
        f"all_reduce by the nodes' leaders takes {bound.times('the bound of the links')}."
        f" {_without(found)} Gloo takes {gloo.times('the time of hbm')}.",
        graded(bound.most <= EQUAL, bound.median <= EQUAL),
        "The keynote has no number for leaders; the 2 to 4 nodes are simulated, and"
        f" {samples(row['hbm'] for row in found)}.",
    )


def _without(found: Sequence[Row]) -> str:
    """Compare hbm without and with leaders, in a sentence, on nodes that have several ranks."""
    ratios = [
        row[WITHOUT].median / row["hbm"].median
        for row in found
        if WITHOUT in row and not Layout(row["hbm"].of["layout"]).lone
    ]
    if not ratios:
        return "hbm without leaders: not measured."
    without = Spread.of(ratios, "hbm without leaders and hbm")
    return f"Without leaders, hbm takes {without.times('as long')}."


_CLAIMS = (
    Claim(
        PANDA,
        "Slides on CNTK and TensorFlow with MVAPICH2-X on CPUs: scalability",
        "Adaptive reductions, and reductions in a shared address space (SALaR, XPMEM), scale well.",
        _leaders,
        "It holds if all_reduce takes at most 1.1 times the bound in all cells, and in part if in"
        " the median.",
    ),
)


NODES = Experiment(
    name="nodes",
    figures="collectives across nodes, with a leader a node",
    label=Label.EMULATED,
    differs=(
        "Two to four network namespaces on one machine of two cores, with links of 200 Mbit/s and 1"
        " Gbit/s, replace a cluster with InfiniBand. A link's bound is the time of the bytes at"
        " TCP's rate, which each run measures first, with both directions at full load. Some times"
        " are below the bound, because the measured rate is below the link's, and a burst of 128"
        " KiB passes the link without a wait. Without leaders, hbm uses MPI between all ranks, also"
        " within a node."
    ),
    claims=_CLAIMS,
    runs=tuple(
        Run(
            f"nodes-{layout}",
            "benchmarks.collectives.nodes",
            [
                f"--layout={layout}",
                *(f"--rate={rate}" for rate in _RATES),
                *(f"--mib={size}" for size in _SIZES),
                "--rounds=3",
            ],
            [f"--layout={layout}", "--rate=200mbit", "--mib=1", "--rounds=1"],
        )
        for layout in _LAYOUTS
    ),
    table=_table,
    panels=_panels,
    answer=_below,
)
