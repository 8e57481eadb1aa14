"""Claims of the papers, and the verdict on each.

Ratios within 10 % of 1 count as equal (EQUAL).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from torch_hbmcomm.bench.result import Measurement, Result

EQUAL = 1.1  # a ratio of at most this counts as equal
LONG_TAIL = 2.0  # a tail of at least this many usual latencies is long


class Verdict(Enum):
    """How far our figures agree with a claim."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    FAILS = "does not hold"
    NOT_MEASURABLE = "not measurable here"  # needs missing hardware or software
    NOT_MEASURED = "not measured yet"


@dataclass(frozen=True)
class Paper:
    """A paper whose claims have verdicts.

    designs: its figures and tables without a result, which have no verdict.
    """

    short: str
    title: str
    designs: str


WOO = Paper("Woo et al.", "Woo, Choi, Lee 2020, MPI for Python in MCDRAM", "Figs. 1 to 6")
AHN = Paper("Ahn et al.", "Ahn, Kim, Lim, Kang 2018, Soft Memory Box", "Figs. 1 to 4 and Table 1")
ZHANG = Paper(
    "Zhang, Jung",
    "Zhang, Jung 2017, An In-depth Performance Analysis of Many-Integrated Core",
    "Fig. 1",
)
LEE = Paper(
    "Lee et al.",
    "Lee, Choi, Jeong, Noh, Shin 2020, Communication Optimization Schemes",
    "Figs. 2 and 4, and Algorithm 1",
)
PANDA = Paper(
    "Panda",
    "Panda 2019, Scalable and Distributed DNN Training on Modern HPC Systems",
    "the slides on trends, holistic evaluation, challenges, MPI collectives, software families,"
    " releases and installation; the conclusions repeat other slides",
)
PAPERS = (WOO, AHN, ZHANG, LEE, PANDA)


@dataclass(frozen=True)
class Outcome:
    """Our finding on a claim.

    here: our measurement or emulation, in a sentence; empty without one.
    reason: the facts that explain or limit the verdict, in a sentence.
    """

    here: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Claim:
    """A finding of a paper.

    item: the numbers of the figures, tables or findings, or the title of the section.
    finding: a sentence.
    outcome: the outcome, or the function that decides it by the results of all runs of an
        experiment, by the runs' names. The function raises Unmeasured if a figure is missing.
    rule: the rule of that function, in a sentence.
    runs: the names of the runs that the claim needs; empty: all runs of the experiment.
    """

    paper: Paper
    item: str
    finding: str
    outcome: Outcome | Callable[[Mapping[str, Result]], Outcome]
    rule: str = ""
    runs: Collection[str] = ()


class Unmeasured(LookupError):
    """The results have no figure for a claim; the message names the figure."""


@dataclass(frozen=True)
class Spread:
    """The range and the median of a ratio over the cells of a table."""

    least: float
    median: float
    most: float
    cells: int

    @classmethod
    def of(cls, ratios: Iterable[float], name: str) -> Spread:
        """Summarise `ratios`. Raises Unmeasured, with the ratio's `name`, if there are none, or if
        one is not finite."""
        found = list(ratios)
        if not found or not all(map(math.isfinite, found)):
            raise Unmeasured(f"The records have no figure of {name}.")
        return cls(min(found), statistics.median(found), max(found), len(found))

    def times(self, what: str) -> str:
        """Return the median as a multiple, as in "1.00 times C's time (0.74 to 1.32 over 8
        cells)"."""
        return f"{self.median:.2f} times {what} ({self.span} over {self.cells} cells)"

    @property
    def equal(self) -> bool:
        """True if all ratios are within 10 % of 1."""
        return self.least >= 1 / EQUAL and self.most <= EQUAL

    @property
    def span(self) -> str:
        return f"{self.least:.2f} to {self.most:.2f}"


def unmeasurable(reason: str, here: str = "") -> Outcome:
    return Outcome(here, Verdict.NOT_MEASURABLE, reason)


def graded(full: bool, part: bool) -> Verdict:
    """Return HOLDS if `full`, otherwise IN_PART if `part`, otherwise FAILS."""
    if full:
        return Verdict.HOLDS
    return Verdict.IN_PART if part else Verdict.FAILS


def compared(ratio: float) -> str:
    """Return how a time compares with another, from their ratio."""
    if ratio > EQUAL:
        return "slower than"
    return "faster than" if ratio < 1 / EQUAL else "as fast as"


def change(ratio: float) -> str:
    """Return a ratio as a change, as in "-94.3 %"."""
    return f"{100 * (ratio - 1):+.1f} %"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def samples(measured: Iterable[Measurement], figure: str = "median") -> str:
    """Return the numbers of samples of the medians, in a clause without a full stop.

    figure: "mean" if the figures are means.

    Measurements without samples do not count. Raises Unmeasured if none has samples.
    """
    counts = [one.samples.n for one in measured if one.samples is not None]
    if not counts:
        raise Unmeasured("The records have no samples.")
    least, most = min(counts), max(counts)
    if most == 1:
        return "each figure is a single sample"
    if least == most:
        return f"each {figure} is of {most} samples"
    return f"the {figure}s are of {least} to {most} samples"
