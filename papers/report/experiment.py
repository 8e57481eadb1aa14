"""An experiment of a paper, and what it takes to repeat it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from torch_hbmcomm.bench.result import Measurement, Result


class Label(Enum):
    """How far a figure can be trusted to say what the paper's says."""

    MEASURED = "measured"
    EMULATED = "emulated"  # slow links by namespaces, computation by sleeping
    NOT_MEASURABLE = "not measurable here"  # no hardware for it, and no emulation that says a time


@dataclass(frozen=True)
class Run:
    """A benchmark that writes one JSON file.

    name: of the file.
    arguments: of `python -m MODULE`, without --json.
    quick: the same for a report of some minutes.
    """

    name: str
    module: str
    arguments: Sequence[str]
    quick: Sequence[str]

    def command(self, quick: bool) -> str:
        """Return it as it is typed."""
        return " ".join(["python -m", self.module, *(self.quick if quick else self.arguments)])


@dataclass(frozen=True)
class Experiment:
    """One or several figures of a paper.

    figures: which, as the paper numbers them.
    differs: how our set-up differs, in a sentence.
    found: what the paper says that it found.
    answer: what our results say to that; nothing where the table alone does.
    runs: none where it is not measurable.
    table, panels: ours, from the results of the runs that there are, by their names.
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
    """Return it with three significant digits, and without an exponent from 0.0001 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(one: Measurement) -> float:
    """Return a measurement's median in milliseconds."""
    return one.median * {"us": 1e-3, "ms": 1.0}[one.unit]
