"""Section break-even: the rate of the link above which dropping does not pay."""

from __future__ import annotations

from functools import partial

from benchmarks.verdict import JudgedSection
from papers.layer_drop import ddp
from papers.layer_drop.contenders import PLAIN
from papers.layer_drop.plan import Plan
from papers.layer_drop.rows import cases, row
from papers.layer_drop.table import tables
from torch_hbmcomm.bench.result import Findings, Unavailable

NAME = "break-even"
_ABOUT = (
    "the hook's time in a step of 4 ranks on this machine, compared with the time that it saves on "
    "the link, if nothing hides communication"
)


def _measure(plan: Plan, findings: Findings) -> None:
    found = cases(findings.of(ddp.NAME))
    if not found:
        raise Unavailable(f"it needs the figures of the section {ddp.NAME}, which has none")
    rows = next(iter(found.values()))
    plain = rows[PLAIN.name].values
    for who, one in rows.items():
        if one.values.get("counted_share", 1) == 1:
            continue
        extra = one.values["compute_ms"] - plain["compute_ms"]
        saved = plain["crossed_mb"] - one.values["crossed_mb"]
        values = {"extra_ms": extra, "saved_mb": saved}
        if extra > 0:
            values["break_even_gbit_s"] = 8 * saved / extra
        findings.add([row(NAME, "compute against communication", who, values)])


BREAK_EVEN = JudgedSection(NAME, _ABOUT, _measure, render=partial(tables, _ABOUT))
