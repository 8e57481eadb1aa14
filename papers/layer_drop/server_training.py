"""Section server-training: a parameter server behind a link, and four workers that learn images.

The net is convolutional, as in the paper's Figs. 5 to 8 and 10 to 13. Variants have the L1 or L2
norm as a layer's score, or throw the residuals of each step away (the paper's section 4.3).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.verdict import JudgedSection, Verdict
from papers.layer_drop.cluster import Cluster, together, two_hosts
from papers.layer_drop.plan import NORMS, WITHOUT_RESIDUALS, Plan
from papers.layer_drop.rows import cases
from papers.layer_drop.table import tables
from papers.layer_drop.tasks import WideConvolutions
from papers.layer_drop.training_curve import POINTS, Curve, case_of, trained
from torch_hbmcomm.bench.result import Findings, Measurement

NAME = "server-training"
ALL = "all is sent"
_ABOUT = (
    "a parameter server behind the link and 4 workers learn images of MNIST; a convolutional net "
    "of 542,000 parameters; accuracy on test images"
)
_ROLE = "papers.layer_drop.server_training_rank"
_NODES = (0, 1, 1, 1, 1)
_LOOKS = 20
_TO_THE_LETTER = {"target": "paper", "max_age": math.inf, "always_send": False}


def ours(ratio: float) -> str:
    """Return the name of the contender with LayerDrop's defaults."""
    return f"R = {ratio:g}"


def papers(ratio: float) -> str:
    """Return the name of the contender with the paper's rule."""
    return f"R = {ratio:g}, the paper's rule"


def variant_of(contender: str, variant: str) -> str:
    """Return the name of a contender's variant."""
    return f"{contender}, {variant.replace('-', ' ')}"


def _contenders(ratios: Sequence[float], variants: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return arguments of the ranks' prepare(), by the contenders' names."""
    found: dict[str, dict[str, Any]] = {ALL: {"terms": None}}
    for ratio in ratios:
        letter = {"ratio": ratio, **_TO_THE_LETTER}
        ways: dict[str, dict[str, Any]] = {ours(ratio): {"ratio": ratio}, papers(ratio): letter}
        for name, terms in ways.items():
            found[name] = {"terms": terms}
            if WITHOUT_RESIDUALS in variants:
                name = variant_of(name, WITHOUT_RESIDUALS)
                found[name] = {"terms": terms, "residuals": False}
        for norm in NORMS:
            if norm in variants:
                name = variant_of(papers(ratio), norm)
                found[name] = {"terms": letter | {"representative": norm.lower()}}
    return found


def _measure(plan: Plan, findings: Findings) -> None:
    WideConvolutions()  # raises Unavailable if the images are missing
    for megabits in plan.megabits:
        with two_hosts(_ROLE, _NODES, megabits) as hosts:
            for optimizer in plan.optimizers:
                findings.add(_of_optimizer(hosts, megabits, optimizer, plan, findings))


def _of_optimizer(
    hosts: Cluster, megabits: int | None, optimizer: str, plan: Plan, findings: Findings
) -> Iterator[Measurement]:
    """Train each contender with one optimizer, and yield its row."""
    case = case_of(megabits, optimizer, plan.training_steps, plan.seeds)
    contenders = {
        name: partial(_learn, hosts, plan.training_steps, {"optimizer": optimizer} | options)
        for name, options in _contenders(plan.ratios, plan.variants).items()
    }
    yield from trained(NAME, case, plan.seeds, contenders, findings.progress)


def _learn(
    hosts: Cluster, steps: int, arguments: Mapping[str, Any], seed: int
) -> tuple[Curve, float]:
    """Train once. Return the curve, and the megabytes over the link in both directions."""
    server, *workers = hosts.ranks
    hosts.all("prepare", steps=steps, seed=seed, **arguments)
    server.tell("serve")
    curve = Curve()
    before = sum(hosts.received())
    done = 0
    for look in range(1, _LOOKS + 1):
        more = steps * look // _LOOKS - done
        if more:
            times, losses = zip(*together(workers, "learn", steps=more), strict=True)
            curve.look(more, max(times), statistics.fmean(losses), workers[0].ask("accuracy"))
            done += more
    crossed = (sum(hosts.received()) - before) / 1e6
    together(workers, "close")
    server.answer()
    return curve, crossed


def _verdicts(rows: Sequence[Measurement]) -> Iterator[Verdict]:
    for case, found in cases(rows).items():
        for name, one in found.items():
            if name != ALL:
                points, sent = one.values["points"], one.values["bytes_share"]
                text = f"{case}, {name}: {points:+.2f} points with {sent:.1%} of the bytes"
                yield Verdict(f"{text} (≥ -{POINTS:g})", points >= -POINTS)


SERVER_TRAINING = JudgedSection(
    NAME, _ABOUT, _measure, render=partial(tables, _ABOUT), verdicts=_verdicts, plotted=True
)
