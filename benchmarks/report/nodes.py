"""Collectives by the nodes' leaders: Panda 2019, multi-leader and hierarchical designs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.collectives.two_nodes import LEAST, LINK, in_rows
from benchmarks.panels import Panel
from benchmarks.report.experiment import Experiment, Label, Run, Table, milliseconds
from torch_hbmcomm.bench.result import Measurement, Result

_RANKS = (2, 4)
_ALL = [f"--collective={name}" for name in LEAST]


def _rows(results: Mapping[str, Result]) -> Iterator[tuple[int, Mapping[str, Measurement]]]:
    """Yield the ranks of a node and the measurements of a row by their contenders."""
    for result in results.values():
        for row in in_rows(result):
            yield int(result.plan["ranks"]), row


def _table(results: Mapping[str, Result]) -> Table:
    rows = []
    for ranks, row in _rows(results):
        of, link = row["hbm"].of, row[LINK]
        least = link.values["crossed_bytes"]
        rows.append(
            [of["collective"], f"2 x {ranks}", f"{of['mib']} MiB"]
            + [f"{milliseconds(row[name]):.1f}" for name in (LINK, "hbm", "gloo")]
            + [f"{row[name].median / link.median:.2f}" for name in ("hbm", "gloo")]
            + [f"{row[name].values['crossed_bytes'] / least:.2f}" for name in ("hbm", "gloo")]
        )
    heading = ["collective", "nodes x ranks", "size", "link, ms", "hbm, ms", "gloo, ms"]
    heading += ["hbm / link", "gloo / link", "hbm crossed / least", "gloo crossed / least"]
    return Table(heading, rows)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panels: dict[int, Panel] = {}
    for ranks, row in _rows(results):
        title = f"2 nodes of {ranks} ranks"
        panel = panels.setdefault(ranks, Panel(title, y="times what the link needs"))
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
            f"nodes-2x{ranks}",
            "benchmarks.collectives.two_nodes",
            [f"--ranks={ranks}", "--rate=200mbit", "--mib=8", "--rounds=5", *_ALL],
            [f"--ranks={ranks}", "--rate=200mbit", "--mib=2", "--rounds=2", *_ALL],
        )
        for ranks in _RANKS
    ),
    table=_table,
    panels=_panels,
)
