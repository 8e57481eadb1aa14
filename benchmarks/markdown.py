"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> Iterator[str]:
        """Yield the lines of the table in Markdown."""
        yield f"| {' | '.join(self.heading)} |"
        yield "| --- " * len(self.heading) + "|"
        yield from (f"| {' | '.join(row)} |" for row in self.rows)
