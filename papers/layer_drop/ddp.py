"""Section ddp: DistributedDataParallel on two hosts, with steps that only communicate."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.verdict import JudgedSection, Verdict
from papers.layer_drop.cluster import Cluster, two_hosts
from papers.layer_drop.contenders import (
    NOTHING_DROPPED,
    PLAIN,
    Contender,
    of_ddp,
)
from papers.layer_drop.plan import Plan, link
from papers.layer_drop.rows import cases, in_proportion, row
from papers.layer_drop.table import tables
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.result import Findings, Measurement
from torch_hbmcomm.sizes import format_bytes

NAME = "ddp"
_ABOUT = (
    "4 ranks on two hosts average gradients of ResNet-50's sizes; compute: the same step in a "
    "group of one rank; bytes as counted: by the hook, in all steps"
)
_NODES = (0, 0, 1, 1)
_WARM = 2  # uncounted steps: DDP arranges its buckets, and PowerSGD does not compress yet
_ALONE = 8  # steps of each contender without communication
_LEAST = {"none": 1.0, "bf16": 0.5}  # share of the gradients' bytes that must cross the link

_POINTS = 0.02
_NOTHING_DROPPED_COSTS = 0.02


@dataclass
class _Found:
    """Measurements of one contender.

    seconds: time of each step, mean over the ranks.
    crossed: bytes over the link in one direction, mean of both directions.
    counted: the hook's own counters.
    """

    seconds: list[float]
    crossed: float
    counted: dict[str, float]

    def __add__(self, other: _Found) -> _Found:
        return _Found(self.seconds + other.seconds, self.crossed + other.crossed, other.counted)

    @property
    def iteration_ms(self) -> float:
        return statistics.fmean(self.seconds) * 1e3

    @property
    def crossed_mb(self) -> float:
        return self.crossed / len(self.seconds) / 1e6


def _measure(plan: Plan, findings: Findings) -> None:
    compute: dict[str, float] = {}  # independent of the link
    for megabits in plan.megabits:
        found: dict[str, _Found] = {}
        with two_hosts("papers.layer_drop.ddp_rank", _NODES, megabits, width=plan.width) as hosts:
            for contender, steps in _turns(plan, megabits):
                findings.progress(f"{NAME}, {link(megabits)}: {contender.name}")
                if contender.name not in compute:
                    alone = _turn(hosts, contender, min(_ALONE, steps), alone=True)
                    compute[contender.name] = statistics.median(alone.seconds) * 1e3
                turn = _turn(hosts, contender, steps)
                before = found.get(contender.name)
                found[contender.name] = turn if before is None else before + turn
        findings.add(_rows(link(megabits), found, compute))


def _turns(plan: Plan, megabits: int | None) -> Iterator[tuple[Contender, int]]:
    """Yield the turns of each contender, with their number of steps."""
    for _ in range(plan.rounds):
        for contender in (PLAIN, NOTHING_DROPPED):
            yield contender, plan.whole_steps
    for contender in of_ddp(plan):
        steps = plan.steps if megabits is None and contender.aim else plan.slow_steps
        yield contender, steps if contender.drops else plan.whole_steps


def _turn(hosts: Cluster, contender: Contender, steps: int, alone: bool = False) -> _Found:
    hosts.all("prepare", **contender.arguments, alone=alone)
    hosts.all("train", steps=_WARM)
    before = hosts.received()
    of_ranks = hosts.all("train", steps=steps)
    seconds = [statistics.fmean(step) for step in zip(*of_ranks, strict=True)]
    ways = [end - start for start, end in zip(before, hosts.received(), strict=True)]
    counted = _counted(hosts, contender)
    if not alone:
        _check_way(hosts, contender, min(ways) / steps)
    hosts.all("release")
    return _Found(seconds, statistics.fmean(ways), counted)


def _counted(hosts: Cluster, contender: Contender) -> dict[str, float]:
    summary, *_ = hosts.all("summary")
    if summary is None:
        return {}
    share = summary["sent_bytes"] / summary["gradient_bytes"]
    aim = {} if contender.aim is None else {"aim": contender.aim}
    return {"steps": summary["steps"], "counted_share": share} | aim


def _check_way(hosts: Cluster, contender: Contender, crossed: float) -> None:
    size, *_ = hosts.all("size")
    least = _LEAST.get(contender.hook, 0) * size
    if crossed < least:
        raise PeerFailed(
            f"{contender.name}: {format_bytes(int(crossed))} of {format_bytes(int(least))} crossed "
            f"the link in a step: the rest took another path"
        )


def _rows(
    case: str, found: Mapping[str, _Found], compute: Mapping[str, float]
) -> Iterator[Measurement]:
    plain = found[PLAIN.name]
    plain_communication = plain.iteration_ms - compute[PLAIN.name]
    for name, one in found.items():
        communication = one.iteration_ms - compute[name]
        values = {
            "compute_ms": compute[name],
            "communication_ms": communication,
            "iteration_ms": one.iteration_ms,
            "crossed_mb": one.crossed_mb,
            "bytes_share": one.crossed_mb / plain.crossed_mb,
            "time_share": communication / plain_communication,
        }
        milliseconds = [seconds * 1e3 for seconds in one.seconds]
        yield row(NAME, case, name, values | one.counted, milliseconds)


def _verdicts(rows: Sequence[Measurement]) -> Iterator[Verdict]:
    longest: dict[str, Measurement] = {}
    for case, found in cases(rows).items():
        yield _nothing_dropped(case, found)
        for one in found.values():
            if one.values.get("aim", 1) < 1:
                before = longest.get(one.contender, one)
                longest[one.contender] = max(before, one, key=lambda found: found.values["steps"])
                if case != link(None):
                    yield in_proportion(one)
    yield from map(_as_asked, longest.values())


def _nothing_dropped(case: str, found: Mapping[str, Measurement]) -> Verdict:
    plain, ours = (found[who.name].median for who in (PLAIN, NOTHING_DROPPED))
    more = ours / plain - 1
    return Verdict(
        f"{case}, {NOTHING_DROPPED.name}: {more:+.1%} (≤ {_NOTHING_DROPPED_COSTS:+.0%}), medians",
        more <= _NOTHING_DROPPED_COSTS,
    )


def _as_asked(row: Measurement) -> Verdict:
    share, aim = row.values["counted_share"], row.values["aim"]
    return Verdict(
        f"{row.of['case']}, {row.contender}: {share:.1%} of the bytes in "
        f"{row.values['steps']:.0f} steps ({aim:.0%} ± {100 * _POINTS:g} points)",
        abs(share - aim) <= _POINTS,
    )


DDP = JudgedSection(
    NAME, _ABOUT, _measure, render=partial(tables, _ABOUT), verdicts=_verdicts, plotted=True
)
