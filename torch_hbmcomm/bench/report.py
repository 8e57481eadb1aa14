"""Parts of reports that benchmarks share."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Verdict:
    """reached: None where nothing was to be reached."""

    text: str
    reached: bool | None


def line(verdict: Verdict) -> Text:
    """Red: a goal that is missed."""
    if verdict.reached is None:
        return Text(verdict.text)
    return Text(verdict.text, style="green" if verdict.reached else "red")


def table_of(title: str, headings: Sequence[str]) -> Table:
    """Numbers beside names, which are in the first column."""
    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left")
    return table
