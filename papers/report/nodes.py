"""Collectives by the nodes' leaders: Panda 2019, multi-leader and hierarchical designs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.collectives.nodes import LINK, table
from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.report.experiment import Experiment, Label, Run
from torch_hbmcomm.bench.report import rows
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
            for name in ("hbm", "gloo"):
                panel.bars.setdefault(name, []).append(row[name].median / link)
    return list(panels.values())


NODES = Experiment(
    name="nodes",
    paper="Panda 2019, Scalable and Distributed DNN Training on Modern HPC Systems",
    figures="collectives across nodes, with a leader a node",
    label=Label.EMULATED,
    differs=(
        "Two to four network namespaces on one machine of two cores, with links of 200 Mbit/s and 1"
        " Gbit/s, replace a cluster with InfiniBand. A link's bound is the time of the bytes at the"
        " link's rate without headers. Some measured times are below the bound, by up to 7 % at 4"
        " MiB and 3 % at 64 MiB. The link's burst of 128 KiB explains 3 to 6 % at 4 MiB, and 0.2 to"
        " 0.4 % at 64 MiB. The rest is unexplained."
    ),
    found=(
        "The keynote has no figure of leaders, nor of reductions across nodes of CPUs. The section"
        " images has the gain of training by reductions in a shared address space.",
    ),
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
)
