"""Where a row stands to what the box shall reach."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch_hbmcomm.bench.box.result import Measurement
from torch_hbmcomm.bench.box.section import Goal, Section
from torch_hbmcomm.bench.times import format_time


@dataclass(frozen=True)
class Verdict:
    """text: as in "97.0% of memcpy (≥ 95%)"."""

    text: str
    reached: bool


Row = Mapping[str, Measurement]
"""By contender: one operation, one size, one number of clients."""


def verdicts(section: Section, row: Row) -> Iterator[Verdict]:
    for goal in section.goals:
        subject = row.get(goal.subject)
        if subject is None or not subject.operation.startswith(goal.operation):
            continue
        bounds = [row[name] for name in goal.bounds if name in row]
        if goal.fair is not None and subject.smallest_share is not None:
            yield _verdict(subject.smallest_share, goal.fair, f"of {goal.subject}'s fair share")
        elif goal.microseconds is not None:
            text = f"{goal.subject} {format_time(subject.median_us)} (≤ {goal.microseconds:g} µs)"
            yield Verdict(text, subject.median_us <= goal.microseconds)
        elif bounds:
            yield _compared(goal, subject, min(bounds, key=lambda bound: bound.median_us))


def _compared(goal: Goal, subject: Measurement, bound: Measurement) -> Verdict:
    if goal.share is not None:
        return _verdict(bound.median_us / subject.median_us, goal.share, f"of {bound.contender}")
    assert goal.times is not None, goal
    times = subject.median_us / bound.median_us
    return Verdict(f"{times:.2f}x {bound.contender} (≤ {goal.times:g})", times <= goal.times)


def _verdict(share: float, least: float, of: str) -> Verdict:
    return Verdict(f"{share:.1%} {of} (≥ {least:.0%})", share >= least)
