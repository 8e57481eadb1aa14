"""An experiment of a paper, and the runs that repeat it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from torch_hbmcomm.bench.result import Measurement, Result


class Label(Enum):
    """How far a figure is comparable with the paper's."""

    MEASURED = "measured"
    EMULATED = "emulated"  # slow links by namespaces, computation by sleeping
    NOT_MEASURABLE = "not measurable here"  # needs missing hardware; no emulation gives times


@dataclass(frozen=True)
class Run:
    """A benchmark that writes one JSON file.

    name: the file's name, without its suffix.
    arguments: arguments of `python -m MODULE`, without --json.
    quick: arguments for a report of some minutes.
    """

    name: str
    module: str
    arguments: Sequence[str]
    quick: Sequence[str]

    def command(self, quick: bool) -> str:
        """Return the command line."""
        return " ".join(["python -m", self.module, *(self.quick if quick else self.arguments)])


@dataclass(frozen=True)
class Experiment:
    """One or several figures of a paper.

    figures: the numbers of the figures in the paper.
    differs: differences of our set-up.
    found: findings of the paper.
    answer: our findings; empty if the table shows them.
    runs: empty if the experiment is not measurable here.
    table, panels: make our table and plots. Each gets the results of the completed runs, by the
        runs' names.
    """

    name: str
    paper: str
    figures: str
    label: Label
    differs: str
    found: Sequence[str]
    runs: Sequence[Run]
    table: Callable[[Mapping[str, Result]], Table]
    panels: Callable[[Mapping[str, Result]], Sequence[Panel]]
    answer: Callable[[Mapping[str, Result]], Sequence[str]] = lambda results: ()


def number(value: float) -> str:
    """Return `value` with three significant digits, without an exponent from 0.0001 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(one: Measurement) -> float:
    """Return a measurement's median in milliseconds."""
    return one.median * {"us": 1e-3, "ms": 1.0}[one.unit]
