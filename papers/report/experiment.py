"""An experiment of a paper, and the runs that repeat it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.report.verdicts import Claim, Outcome, Unmeasured, Verdict
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
    claims: findings of the paper, at least one.
    answer: our figures that neither the table nor the claims have.
    runs: empty if the experiment is not measurable here.
    table, panels: make our table and plots. Each gets the results of the completed runs, by the
        runs' names.
    """

    name: str
    figures: str
    label: Label
    differs: str
    claims: Sequence[Claim]
    runs: Sequence[Run]
    table: Callable[[Mapping[str, Result]], Table]
    panels: Callable[[Mapping[str, Result]], Sequence[Panel]]
    answer: Callable[[Mapping[str, Result]], Sequence[str]] = lambda results: ()

    @property
    def papers(self) -> str:
        """The titles of the papers."""
        return "; ".join(dict.fromkeys(claim.paper.title for claim in self.claims))

    def measured(self, claim: Claim, results: Mapping[str, Result]) -> bool:
        """Return True if all runs that the claim needs have results."""
        return set(claim.runs or (run.name for run in self.runs)) <= set(results)

    def outcome(self, claim: Claim, results: Mapping[str, Result], quick: bool) -> Outcome:
        """Return the outcome of a claim. Without the full runs that it needs it is NOT_MEASURED,
        unless the outcome is constant."""
        if isinstance(claim.outcome, Outcome):
            return claim.outcome
        if quick or not self.measured(claim, results):
            command = f"python -m papers.report --full --only {self.name}"
            return Outcome("", Verdict.NOT_MEASURED, f"A verdict needs the full run: `{command}`.")
        try:
            return claim.outcome(results)
        except Unmeasured as missing:
            return Outcome("", Verdict.NOT_MEASURED, str(missing))


def number(value: float) -> str:
    """Return `value` with three significant digits, without an exponent from 0.0001 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(one: Measurement) -> float:
    """Return a measurement's median in milliseconds."""
    return one.median * {"us": 1e-3, "ms": 1.0}[one.unit]
