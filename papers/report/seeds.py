"""Trainings with several seeds: Lee et al. 2020, section 6.1, Figs. 5 to 8.

The functions on a training with several seeds also serve other experiments.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.layer_drop.plot import panels as panels_of_dropping
from papers.layer_drop.server_training import ALL, NAME, ours, papers
from papers.layer_drop.training_curve import POINTS
from papers.report.dropping import SOONER
from papers.report.experiment import Experiment, Label, Run
from papers.report.verdicts import EQUAL, LEE, Claim, Outcome, Unmeasured, graded, percent
from torch_hbmcomm.bench.result import Measurement, Result

SEEDS = 5
OPTIMIZERS = ("SGD", "momentum")
_RUN = "layer-drop-seeds"
_RULES = {"LayerDrop's defaults": ours, "the paper's rule": papers}
SENT = EQUAL * 182 / 3457  # 1.1 times the paper's time of communication over that without dropping


@dataclass(frozen=True)
class Seeds:
    """A figure of a training, for each seed."""

    figures: Sequence[float]

    @classmethod
    def of(cls, one: Measurement, name: str) -> Seeds:
        """Return a figure of a training for the judgement of a claim.

        Raises Unmeasured for fewer than two seeds, or if a seed has no finite figure.
        """
        found = cls(one.curves.get(f"{name}_by_seed", ()))
        if len(found.figures) < 2:
            raise Unmeasured(f"A standard error needs two seeds of {one.contender}.")
        if not all(map(math.isfinite, found.figures)):
            raise Unmeasured(f"A seed of {one.contender} has no finite {name}.")
        return found

    @property
    def mean(self) -> float:
        return statistics.fmean(self.figures)

    @property
    def error(self) -> float:
        """The standard error of the mean. REQUIRES: at least two seeds."""
        return statistics.stdev(self.figures) / math.sqrt(len(self.figures))

    def text(self, form: str = "+.2f") -> str:
        """Return the mean and its standard error, as in "-0.12 ± 0.05"."""
        if len(self.figures) < 2:
            return format(self.mean, form)
        return f"{self.mean:{form}} ± {self.error:{form.removeprefix('+')}}"

    def less(self, other: Seeds) -> Seeds:
        """Return the differences, seed by seed. Raises Unmeasured for other numbers of seeds."""
        if len(self.figures) != len(other.figures):
            raise Unmeasured("The compared trainings have different numbers of seeds.")
        return Seeds([a - b for a, b in zip(self.figures, other.figures, strict=True)])


def cases_of(results: Mapping[str, Result]) -> dict[str, dict[str, Measurement]]:
    """Return the trainings by case and contender."""
    found: dict[str, dict[str, Measurement]] = {}
    for result in results.values():
        for one in result.measurements:
            found.setdefault(one.of["case"], {})[one.contender] = one
    return found


def table(results: Mapping[str, Result]) -> Table:
    """Return the table of the trainings: means and standard errors over the seeds."""
    rows = [
        [case, who, f"{one.values['iteration_ms']:.0f}"]
        + [f"{one.values[name] - 1:+.1%}" for name in ("iteration_share", "bytes_share")]
        + [entry(one, "loss", ".3f"), entry(one, "accuracy", ".2f"), entry(one, "points")]
        + [entry(one, "seconds", ".1f"), entry(one, "sooner", ".2f")]
        for case, trainings in cases_of(results).items()
        for who, one in trainings.items()
    ]
    heading = ["network", "who", "an iteration, ms", "an iteration", "bytes", "loss"]
    heading += ["accuracy, %", "points compared with all sent", "seconds"]
    heading += ["speed-up until 0.5 points below the final accuracy of all sent (0: never)"]
    return Table(heading, rows)


def entry(one: Measurement, name: str, form: str = "+.2f") -> str:
    """Return a figure of a training for a table."""
    return Seeds(one.curves[f"{name}_by_seed"]).text(form)


def panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    """Return the curves of loss and accuracy, means over the seeds."""
    return [one for result in results.values() for one in panels_of_dropping(result)[0]]


def largest_equal(trainings: Mapping[float, Measurement]) -> float | None:
    """Return the largest R up to which all trainings end at most POINTS lower than all sent, in the
    mean; None if the least R ends lower.

    trainings: by R.
    """
    found = None
    for ratio in sorted(trainings):
        if Seeds.of(trainings[ratio], "points").mean < -POINTS:
            break
        found = ratio
    return found


def _rules(results: Mapping[str, Result]) -> Iterator[tuple[str, str, dict[float, Measurement]]]:
    """Yield each optimizer and rule with its trainings by R.

    REQUIRES: each result is of one optimizer. Raises Unmeasured for an optimizer without trainings.
    """
    for result in results.values():
        trainings = {one.contender: one for one in result.measurements}
        optimizer = ", ".join(result.plan["optimizers"])
        for rule, name in _RULES.items():
            named = {ratio: name(ratio) for ratio in result.plan["ratios"]}
            found = {ratio: trainings[who] for ratio, who in named.items() if who in trainings}
            if not found:
                raise Unmeasured(f"The record has no training with {optimizer} and {rule}.")
            yield optimizer, rule, found


def _end(results: Mapping[str, Result]) -> Outcome:
    shown = []
    least: dict[str, float] = {}  # share of the bytes, by optimizer
    for optimizer, rule, trainings in _rules(results):
        least.setdefault(optimizer, 1.0)
        equal = largest_equal(trainings)
        ratio = min(trainings) if equal is None else equal
        sent = trainings[ratio].values["bytes_share"]
        if equal is not None:
            least[optimizer] = min(least[optimizer], sent)
        points = Seeds.of(trainings[ratio], "points").text()
        shown.append(
            f"{'below' if equal is None else 'at least'} {ratio:g} with {optimizer} and {rule}"
            f" ({points} points, {percent(sent)} of the bytes)"
        )
    return Outcome(
        f"The largest R with the final accuracy of all sent is {', '.join(shown)}.",
        graded(
            all(sent <= SENT for sent in least.values()),
            any(sent < 1 / EQUAL for sent in least.values()),
        ),
        f"The paper does not state R. {_of(results)}",
    )


def _sooner(results: Mapping[str, Result]) -> Outcome:
    found = {
        f"R = {ratio:g} by {rule} with {optimizer}": Seeds.of(one, "sooner")
        for optimizer, rule, trainings in _rules(results)
        for ratio, one in trainings.items()
    }
    reached = {who: one for who, one in found.items() if min(one.figures) > 0}
    here = (
        f"{len(reached)} of {len(found)} trainings reach the final accuracy of all sent (less"
        f" {POINTS} points) with every seed."
    )
    best = 0.0
    if reached:
        who = max(reached, key=lambda who: reached[who].mean)
        best = reached[who].mean
        here += f" The fastest is {who}: {reached[who].text('.2f')} times as fast as all sent."
    return Outcome(
        here,
        graded(best >= SOONER, best > EQUAL),
        f"Communication is a smaller part of an iteration than in the paper (88 %). {_of(results)}",
    )


def _of(results: Mapping[str, Result]) -> str:
    """Return the task and the number of seeds, in sentences."""
    seeds = sorted({result.plan["seeds"] for result in results.values()})
    numbers = " or ".join(map(str, seeds))
    return f"A small net learns MNIST; a mean of {numbers} seeds has its standard error after ±."


_CLAIMS = (
    Claim(
        LEE,
        "Figs. 5 and 6, Table 1: equal accuracy, several seeds",
        "At 1 Gbit/s, accuracy is equal in the end, and communication takes 5 % of the time.",
        _end,
        f"Equal means at most {POINTS} points lower in the mean, with this R and each smaller"
        " measured R. It holds if each optimizer has a rule whose largest such R sends at most"
        " 5.8 % of the bytes, and in part if some R sends less than all.",
    ),
    Claim(
        LEE,
        "Figs. 7 and 8, several seeds",
        "At 1 Gbit/s, training converges in about 14,000 s instead of 50,000 s, 3.6 times as fast.",
        _sooner,
        "It holds if the fastest training that reaches the accuracy with every seed is 3.6 times as"
        " fast as all sent in the mean, and in part if more than 1.1 times.",
    ),
)


def runs_of(name: str, section: str, *arguments: str) -> Iterator[Run]:
    """Yield a run of a section for each optimizer, over 1 Gbit/s."""
    for optimizer in OPTIMIZERS:
        terms = [f"--sections={section}", f"--optimizers={optimizer}", "--megabits=1000"]
        terms += arguments
        yield Run(
            f"{name}-{optimizer.lower()}",
            "papers.layer_drop",
            [*terms, f"--seeds={SEEDS}"],
            [*terms, "--quick", "--training-steps=2"],
        )


SEVERAL_SEEDS = Experiment(
    name=_RUN,
    figures="Table 1, Figs. 5 to 8, five seeds",
    label=Label.EMULATED,
    differs=(
        "The net, the data, the hosts and the link of 1 Gbit/s are those of the section"
        f" layer-drop-training. {SEEDS} seeds set the first weights and the order of the images."
        ' Rows "R = ..." have LayerDrop\'s defaults (its target "bytes"); the paper\'s rule is'
        f' the target "paper". The row "{ALL}" is the paper\'s training without dropping.'
    ),
    claims=_CLAIMS,
    runs=tuple(runs_of(_RUN, NAME)),
    table=table,
    panels=panels,
)
