"""Collectives by the nodes' leaders: Panda 2019, multi-leader and hierarchical designs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.collectives.nodes import LINK
from benchmarks.panels import Panel
from benchmarks.report.experiment import Experiment, Label, Run, Table, milliseconds
from torch_hbmcomm.bench.report import Row, rows
from torch_hbmcomm.bench.result import Result

_LAYOUTS = ("2x2", "2x4")


def _rows(results: Mapping[str, Result]) -> Iterator[Row]:
    """Yield the measurements of each row by their contenders."""
    for result in results.values():
        yield from rows(result.measurements)


def _table(results: Mapping[str, Result]) -> Table:
    lines = []
    for row in _rows(results):
        of, link = row["hbm"].of, row[LINK]
        least = link.values["crossed_bytes"]
        lines.append(
            [of["collective"], of["layout"], f"{of['mib']} MiB"]
            + [f"{milliseconds(row[name]):.1f}" for name in (LINK, "hbm", "gloo")]
            + [f"{row[name].median / link.median:.2f}" for name in ("hbm", "gloo")]
            + [f"{row[name].values['crossed_bytes'] / least:.2f}" for name in ("hbm", "gloo")]
        )
    heading = ["collective", "nodes x ranks", "size", "link, ms", "hbm, ms", "gloo, ms"]
    heading += ["hbm / link", "gloo / link", "hbm crossed / least", "gloo crossed / least"]
    return Table(heading, lines)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panels: dict[str, Panel] = {}
    for row in _rows(results):
        layout = row[LINK].of["layout"]
        title = f"nodes x ranks: {layout}"
        panel = panels.setdefault(layout, Panel(title, y="times what the link needs"))
        panel.labels = [*panel.labels, f"{row['hbm'].of['collective']}\n{row['hbm'].of['mib']} MiB"]
        for name in ("hbm", "gloo"):
            panel.bars.setdefault(name, []).append(row[name].median / row[LINK].median)
    return list(panels.values())


NODES = Experiment(
    name="nodes",
    paper="Panda 2019, Scalable and Distributed DNN Training on Modern HPC Systems",
    figures="leaders and multi-leader collectives",
    label=Label.EMULATED,
    differs=(
        "Two network namespaces on one machine of two cores with a cable of 200 Mbit/s, instead of"
        " a cluster with InfiniBand; the keynote's figures are of other sizes and machines."
    ),
    found=("Several leaders a node and pipelining hide what a node does behind its link.",),
    runs=tuple(
        Run(
            f"nodes-{layout}",
            "benchmarks.collectives.nodes",
            [f"--layout={layout}", "--rate=200mbit", "--mib=8", "--rounds=5"],
            [f"--layout={layout}", "--rate=200mbit", "--mib=2", "--rounds=2"],
        )
        for layout in _LAYOUTS
    ),
    table=_table,
    panels=_panels,
)
