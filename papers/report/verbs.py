"""The memory box over RDMA: Zhang and Jung 2017, Fig. 3 (RMA), Ahn et al. 2018, Fig. 5."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.markdown import Table
from papers.report.experiment import Experiment, Label, Run, number
from papers.report.verdicts import (
    AHN,
    ZHANG,
    Claim,
    Outcome,
    Spread,
    Verdict,
    graded,
    percent,
)
from papers.verbs import OURS, PERFTEST, UNREGISTERED
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import Result
from torch_hbmcomm.sizes import format_bytes

_RUN = "verbs"
_WHO = (OURS, UNREGISTERED, PERFTEST)
_LINK_SHARE = 0.79  # of reads in the paper


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


def _share(results: Mapping[str, Result]) -> Outcome:
    rows = [row for row in report.rows(results[_RUN].measurements) if {OURS, PERFTEST} <= set(row)]
    shares = [row[OURS].summary.maximum / row[PERFTEST].summary.maximum for row in rows]
    ratio = Spread.of(shares, "hbm and perftest")
    return Outcome(
        f"Reads and writes of one client reach {percent(ratio.least)} to {percent(ratio.most)} of"
        " perftest's speed.",
        graded(full=False, part=ratio.least >= _LINK_SHARE),
        "One client in a virtual machine, whose processors do the adapter's work, cannot show the"
        " rate of a link. Each speed is from the faster of two rounds.",
    )


_CLAIMS = (
    Claim(
        ZHANG,
        "Fig. 3, finding 4",
        "Above 512 B, one of messages and RMA is better than the other; the sentence names messages"
        " twice. An access by RMA has at least 4 KiB.",
        Outcome(
            "",
            Verdict.NOT_MEASURED,
            "`python -m papers.verbs` measures no SEND and RECV, and nothing below 4 KiB.",
        ),
    ),
    Claim(
        AHN,
        "Fig. 5, reads and writes apart, by RDMA",
        "By RDMA, reads use up to 79 % of the link (5.5 of 7 GB/s, 8 clients). Writes use up to"
        " 74 % (5.2 GB/s, 32 clients).",
        _share,
        "It holds in part if all reads and writes reach 79 % of perftest's speed, as reads reach"
        " 79 % of the link in the paper. It can only hold with several clients and a link.",
    ),
    Claim(
        AHN,
        "Fig. 5, reads and writes mixed, by RDMA",
        "By RDMA, mixed reads and writes use up to 96 % of the link (6.7 of 7 GB/s).",
        Outcome(
            "",
            Verdict.NOT_MEASURED,
            "`python -m papers.verbs` does not mix reads and writes, and has one client.",
        ),
    ),
)


VERBS = Experiment(
    name="verbs",
    figures="RMA over verbs: Fig. 3 of Zhang and Jung, Fig. 5 of Ahn et al.",
    label=Label.EMULATED,
    differs=(
        "One client and a box run in a virtual machine, with soft-RoCE over a link within it. Its"
        " two emulated processors also do the adapter's work. The calls to verbs are real. Each"
        " speed is from the faster of two rounds. The speeds only show the box's share of"
        " perftest's speed in this machine."
    ),
    claims=_CLAIMS,
    runs=(Run(_RUN, "papers.verbs", [], ["--mebibytes=4"]),),
    table=_table,
    panels=lambda results: (),
)
