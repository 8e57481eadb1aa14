"""A part of the run: what is measured side by side, and what dropping shall reach there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch_hbmcomm.bench.layer_drop.plan import Plan
from torch_hbmcomm.bench.report import Verdict


@dataclass(frozen=True)
class Row:
    """case: what it was measured under, the title of a table. values: by their names in columns.py.
    samples: what some of them are means of, or the points of a curve."""

    section: str
    case: str
    contender: str
    values: dict[str, float]
    samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Findings:
    """Filled while sections are measured.

    progress: told what comes next.
    unavailable: sections that were not measured, and why.
    """

    progress: Callable[[str], None] = lambda what: None
    rows: list[Row] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)

    def of(self, section: str) -> list[Row]:
        return [row for row in self.rows if row.section == section]


@dataclass(frozen=True)
class Section:
    """
    about: what it compares, in a line.
    measure: raises Unavailable, or PeerFailed.
    verdicts: where its rows stand.
    plotted: whether plot.py shows something of it.
    """

    name: str
    about: str
    measure: Callable[[Plan, Findings], None]
    verdicts: Callable[[Sequence[Row]], Iterator[Verdict]]
    plotted: bool = False


def cases(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By case and contender, in the order in which they were measured. REQUIRES: one section."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.case, {})[row.contender] = row
    return found
