"""The rate of the link above which dropping does not pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_hbmcomm.bench.layer_drop import ddp
from torch_hbmcomm.bench.layer_drop.contenders import PLAIN
from torch_hbmcomm.bench.layer_drop.plan import Plan
from torch_hbmcomm.bench.layer_drop.section import Findings, Row, Section, cases
from torch_hbmcomm.bench.report import Verdict
from torch_hbmcomm.bench.unavailable import Unavailable

NAME = "break-even"
_ABOUT = (
    "what the hook takes of a step of 4 ranks on this machine, against what it saves on the link, "
    "if nothing hides communication"
)


def _measure(plan: Plan, findings: Findings) -> None:
    found = cases(findings.of(ddp.NAME))
    if not found:
        raise Unavailable(f"it is made of the figures of the section {ddp.NAME}, which has none")
    rows = next(iter(found.values()))
    plain = rows[PLAIN.name].values
    for who, row in rows.items():
        if "counted_share" not in row.values or row.values["counted_share"] == 1:
            continue
        extra = row.values["compute_ms"] - plain["compute_ms"]
        saved = plain["crossed_mb"] - row.values["crossed_mb"]
        values = {"extra_ms": extra, "saved_mb": saved}
        if extra > 0:
            values["break_even_gbit_s"] = 8 * saved / extra
        findings.rows.append(Row(NAME, "compute against communication", who, values))


def _verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Nothing is to be reached."""
    return iter(())


BREAK_EVEN = Section(NAME, _ABOUT, _measure, _verdicts)
