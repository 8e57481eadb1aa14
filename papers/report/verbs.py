"""The memory box over RDMA: Zhang and Jung 2017, Figs. 2 to 4 (RMA), Ahn et al. 2018, Fig. 5."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.markdown import Table
from papers.report.experiment import Experiment, Label, Run, number
from papers.verbs import OURS, PERFTEST, UNREGISTERED
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import Result
from torch_hbmcomm.sizes import format_bytes

_RUN = "verbs"
_WHO = (OURS, UNREGISTERED, PERFTEST)


def _table(results: Mapping[str, Result]) -> Table:
    rows = []
    for row in report.rows(results[_RUN].measurements):
        of = row[OURS].of
        speeds = {who: row[who].summary.maximum for who in _WHO}
        rows.append(
            [of["operation"], format_bytes(of["bytes"])]
            + [number(speeds[who]) for who in _WHO]
            + [f"{speeds[OURS] / speeds[PERFTEST]:.0%}"]
        )
    heading = ["operation", "size", *(f"{who}, MiB/s" for who in _WHO), "share of perftest's speed"]
    return Table(heading, rows)


VERBS = Experiment(
    name="verbs",
    paper="Zhang, Jung 2017, An In-depth Performance Analysis of Many-Integrated Core; Ahn, Kim,"
    " Lim, Kang 2018, Soft Memory Box",
    figures="RMA of Figs. 2 to 4, and Fig. 5, over verbs",
    label=Label.EMULATED,
    differs=(
        "One client and a box run in a virtual machine, with soft-RoCE over a link within it. Its"
        " two emulated processors also do the adapter's work. The calls to verbs are real. Each"
        " speed is from the fastest of two rounds. The speeds only show the box's share of"
        " perftest's speed in this machine."
    ),
    found=(
        "Zhang and Jung: RMA has an access granularity of 4 KiB, and four connections are enough.",
        "Ahn et al.: mixed reads and writes reach 96 % of the link's bandwidth. They were not"
        " measured here.",
    ),
    runs=(Run(_RUN, "papers.verbs", [], ["--mebibytes=4"]),),
    table=_table,
    panels=lambda results: (),
)
