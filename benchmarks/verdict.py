"""Verdicts: whether a figure reaches its goal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from torch_hbmcomm.bench.result import Measurement, Section

Row = Mapping[str, Measurement]
"""Measurements by contender."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison with a goal.

    text: as in "97.0% of memcpy (≥ 95%)".
    reached: True if the goal is reached; None if there is no goal.
    """

    text: str
    reached: bool | None


def line(verdict: Verdict) -> Text:
    """Format a verdict for the terminal, in red if the goal is missed."""
    if verdict.reached is None:
        return Text(verdict.text)
    return Text(verdict.text, style="green" if verdict.reached else "red")


@dataclass(frozen=True)
class JudgedSection(Section):
    """A section of a paper's benchmark.

    render: makes the tables.
    verdicts: compares the measurements with the goals.
    plotted: True if the benchmark's plot.py shows the section.
    """

    render: Callable[[Sequence[Measurement]], Iterator[RenderableType]] = lambda found: iter(())
    verdicts: Callable[[Sequence[Measurement]], Iterator[Verdict]] = lambda found: iter(())
    plotted: bool = False


def tables(
    sections: Mapping[str, JudgedSection], found: Sequence[Measurement]
) -> Iterator[RenderableType]:
    """Yield the tables of each section, with its verdicts below."""
    for name, section in sections.items():
        own = [one for one in found if one.of["section"] == name]
        if own:
            yield from section.render(own)
            yield from map(line, section.verdicts(own))
