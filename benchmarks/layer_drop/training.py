"""Section training: real data over a slow link, as in the paper's Figs. 5 to 8."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.layer_drop.cluster import Cluster, two_hosts
from benchmarks.layer_drop.contenders import (
    BFLOAT16,
    PLAIN,
    POWER_SGD,
    RATIO,
    Contender,
    dropping,
)
from benchmarks.layer_drop.plan import Plan, link
from benchmarks.layer_drop.rows import cases, row
from benchmarks.layer_drop.table import tables
from benchmarks.verdict import JudgedSection, Verdict
from torch_hbmcomm.bench.result import Findings, Measurement, Unavailable

NAME = "training"
_ABOUT = (
    "4 ranks on two hosts learn handwritten digits; a perceptron of 1.1 million parameters, "
    "plain SGD; accuracy on test images; bfloat16 and PowerSGD with one seed"
)
_NODES = (0, 0, 1, 1)
_DROPPING = dropping(RATIO)
_COMPARED = (PLAIN, _DROPPING)  # with all seeds
_OTHERS = (BFLOAT16, POWER_SGD)  # with one

_POINTS = 0.5
_SOONER = 3.0


@dataclass(frozen=True)
class _Curve:
    """Loss and accuracy epoch by epoch; seconds since the start."""

    seconds: list[float]
    loss: list[float]
    accuracy: list[float]

    def until(self, accuracy: float) -> float | None:
        """Return the seconds until that accuracy; None if it is never reached."""
        points = zip(self.seconds, self.accuracy, strict=True)
        return next((at for at, found in points if found >= accuracy), None)


def _mean(curves: Sequence[_Curve]) -> _Curve:
    def of(columns: Iterable[Sequence[float]]) -> list[float]:
        return [statistics.fmean(epoch) for epoch in zip(*columns, strict=True)]

    return _Curve(
        of(one.seconds for one in curves),
        of(one.loss for one in curves),
        of(one.accuracy for one in curves),
    )


def _measure(plan: Plan, findings: Findings) -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise Unavailable("scikit-learn is not installed: pip install scikit-learn")
    curves: dict[str, list[_Curve]] = {}
    with two_hosts("benchmarks.layer_drop.training_rank", _NODES, plan.training_megabits) as hosts:
        for seed in range(plan.seeds):
            for contender in _COMPARED if seed > 0 else (*_COMPARED, *_OTHERS):
                findings.progress(f"{NAME}: seed {seed}, {contender.name}")
                steps, curve = _learn(hosts, contender, plan.epochs, seed)
                curves.setdefault(contender.name, []).append(curve)
    case = f"{link(plan.training_megabits)}, epochs: {plan.epochs}, means of {plan.seeds} seeds"
    findings.add(_row(case, name, steps, curves) for name in curves)


def _learn(hosts: Cluster, contender: Contender, epochs: int, seed: int) -> tuple[int, _Curve]:
    """Train with one seed. Returns the steps of an epoch, and the curve."""
    options = {"hook": contender.hook, "terms": dict(contender.terms)}
    steps, *_ = hosts.all("prepare", **options, epochs=epochs, seed=seed)
    curve = _Curve([], [], [])
    now = 0.0
    for _ in range(epochs):
        times, losses = zip(*hosts.all("epoch"), strict=True)
        now += max(times)
        curve.seconds.append(now)
        curve.loss.append(statistics.fmean(losses))
        curve.accuracy.append(hosts.ranks[0].ask("accuracy"))
    return steps, curve


def _row(case: str, name: str, steps: int, curves: Mapping[str, Sequence[_Curve]]) -> Measurement:
    found = curves[name]
    own, plain = _mean(found), _mean(curves[PLAIN.name][: len(found)])  # of the same seeds
    epochs = len(own.seconds)
    values = {
        "iteration_ms": 1e3 * own.seconds[-1] / (epochs * steps),
        "seconds": own.seconds[-1],
        "loss": own.loss[-1],
        "accuracy": own.accuracy[-1],
        "points": own.accuracy[-1] - plain.accuracy[-1],
    }
    target = plain.accuracy[-1] - _POINTS
    until, plain_until = own.until(target), plain.until(target)
    if until is not None and plain_until is not None:
        values |= {"target_seconds": until, "sooner": plain_until / until}
    points = {
        "accuracy_by_seed": [one.accuracy[-1] for one in found],
        "steps": [float(steps * (1 + epoch)) for epoch in range(epochs)],
    }
    return row(NAME, case, name, values, curves=points | asdict(own))


def _verdicts(rows: Sequence[Measurement]) -> Iterator[Verdict]:
    for found in cases(rows).values():
        ours = found[_DROPPING.name].values
        points, sooner = ours["points"], ours.get("sooner", 0)
        when = f"{sooner:.2f} times sooner" if sooner else "never"
        yield Verdict(
            f"{_DROPPING.name}: {points:+.2f} points at equal epochs (≥ -{_POINTS:g})",
            points >= -_POINTS,
        )
        yield Verdict(
            f"{_DROPPING.name}: {PLAIN.name}'s accuracy less {_POINTS:g} points: {when} "
            f"(≥ {_SOONER:g}; paper: 3.6)",
            sooner >= _SOONER,
        )


TRAINING = JudgedSection(
    NAME, _ABOUT, _measure, render=partial(tables, _ABOUT), verdicts=_verdicts, plotted=True
)
