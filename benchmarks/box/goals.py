"""Goals of the box, relative to bounds that are measured alternately with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from benchmarks.verdict import Row, Verdict, line
from torch_hbmcomm.bench.report import format_time
from torch_hbmcomm.bench.result import Measurement


@dataclass(frozen=True)
class Goal:
    """A goal of the contender `subject`. Exactly one of the last four fields is set.

    bounds: contenders to compare with; the fastest of the measured ones counts.
    operation: prefix of the operations' names that the goal applies to.
    share: least speed, as a share of the bound's speed.
    times: longest time, as a multiple of the bound's time.
    microseconds: longest time. Such a goal has no bounds.
    fair: fewest bytes that any client may move, as a share of the mean over the clients.
    """

    subject: str
    bounds: Sequence[str] = ()
    operation: str = ""
    share: float | None = None
    times: float | None = None
    microseconds: float | None = None
    fair: float | None = None


def verdicts(goals: Sequence[Goal], row: Row) -> Iterator[Verdict]:
    """Yield a verdict for each goal that applies to the row. Times and speeds are medians."""
    for goal in goals:
        subject = row.get(goal.subject)
        if subject is None or not subject.of["operation"].startswith(goal.operation):
            continue
        bounds = [row[name] for name in goal.bounds if name in row]
        if goal.fair is not None and "smallest_share" in subject.values:
            share = subject.values["smallest_share"]
            yield _verdict(share, goal.fair, f"of {goal.subject}'s fair share")
        elif goal.microseconds is not None:
            text = f"{goal.subject} {format_time(subject.median)} (≤ {goal.microseconds:g} µs)"
            yield Verdict(text, subject.median <= goal.microseconds)
        elif bounds:
            yield _compared(goal, subject, min(bounds, key=lambda bound: bound.median))


def column(goals: Sequence[Goal], row: Row) -> Text:
    return Text("\n").join(line(verdict) for verdict in verdicts(goals, row))


def _compared(goal: Goal, subject: Measurement, bound: Measurement) -> Verdict:
    if goal.share is not None:
        return _verdict(bound.median / subject.median, goal.share, f"of {bound.contender}")
    assert goal.times is not None, goal
    times = subject.median / bound.median
    return Verdict(f"{times:.2f}x {bound.contender} (≤ {goal.times:g})", times <= goal.times)


def _verdict(share: float, least: float, of: str) -> Verdict:
    return Verdict(f"{share:.1%} {of} (≥ {least:.0%})", share >= least)
