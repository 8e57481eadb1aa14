"""Section training: real data over a slow link, as in the paper's Figs. 5 to 8."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.verdict import JudgedSection, Verdict
from papers.layer_drop.cluster import Cluster, two_hosts
from papers.layer_drop.contenders import (
    BFLOAT16,
    PLAIN,
    POWER_SGD,
    RATIO,
    Contender,
    dropping,
)
from papers.layer_drop.plan import Plan, link
from papers.layer_drop.rows import cases
from papers.layer_drop.table import tables
from papers.layer_drop.training_curve import POINTS, Curve, learned
from torch_hbmcomm.bench.result import Findings, Measurement, Unavailable

NAME = "training"
_ABOUT = (
    "4 ranks on two hosts learn handwritten digits; a perceptron of 1.1 million parameters, "
    "plain SGD; accuracy on test images; bfloat16 and PowerSGD with one seed"
)
_NODES = (0, 0, 1, 1)
_DROPPING = dropping(RATIO)
_COMPARED = (PLAIN, _DROPPING)  # run with all seeds
_OTHERS = (BFLOAT16, POWER_SGD)  # run with one seed

_SOONER = 3.0


def _measure(plan: Plan, findings: Findings) -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise Unavailable("scikit-learn is not installed: pip install scikit-learn")
    curves: dict[str, list[Curve]] = {}
    with two_hosts(
        "papers.layer_drop.training_rank", _NODES, plan.training_megabits, batch=plan.batch
    ) as hosts:
        for seed in range(plan.seeds):
            for contender in _COMPARED if seed > 0 else (*_COMPARED, *_OTHERS):
                findings.progress(f"{NAME}: seed {seed}, {contender.name}")
                curve = _learn(hosts, contender, plan.epochs, seed)
                curves.setdefault(contender.name, []).append(curve)
    case = f"{link(plan.training_megabits)}, epochs: {plan.epochs}, means of {plan.seeds} seeds"
    plain = curves[PLAIN.name]
    findings.add(learned(NAME, case, name, found, plain) for name, found in curves.items())


def _learn(hosts: Cluster, contender: Contender, epochs: int, seed: int) -> Curve:
    """Train with one seed."""
    options = {"hook": contender.hook, "terms": dict(contender.terms)}
    steps, *_ = hosts.all("prepare", **options, epochs=epochs, seed=seed)
    curve = Curve()
    for _ in range(epochs):
        times, losses = zip(*hosts.all("epoch"), strict=True)
        accuracy = hosts.ranks[0].ask("accuracy")
        curve.look(steps, max(times), statistics.fmean(losses), accuracy)
    return curve


def _verdicts(rows: Sequence[Measurement]) -> Iterator[Verdict]:
    for found in cases(rows).values():
        ours = found[_DROPPING.name].values
        points, sooner = ours["points"], ours.get("sooner", 0)
        when = f"{sooner:.2f} times sooner" if sooner else "never"
        yield Verdict(
            f"{_DROPPING.name}: {points:+.2f} points at equal epochs (≥ -{POINTS:g})",
            points >= -POINTS,
        )
        yield Verdict(
            f"{_DROPPING.name}: {PLAIN.name}'s accuracy less {POINTS:g} points: {when} "
            f"(≥ {_SOONER:g}; paper: 3.6)",
            sooner >= _SOONER,
        )


TRAINING = JudgedSection(
    NAME, _ABOUT, _measure, render=partial(tables, _ABOUT), verdicts=_verdicts, plotted=True
)
