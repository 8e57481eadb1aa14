"""Goals of the box."""

import statistics
from collections.abc import Callable, Sequence

from benchmarks.verdict import Row, Verdict
from torch_hbmcomm.bench.report import format_time
from torch_hbmcomm.bench.result import Measurement

Goal = Callable[[Sequence[Row]], Verdict | None]
"""Judges all rows of a scenario. Returns None if no row has both contenders of the goal."""

LINK = "link"
"""The contender that is the bound."""

_AT_THE_BOUND = 0.8  # the bound counts as reached if it is at least this share of the time


def not_hidden_ms(found: Measurement) -> float:
    """Return the exposed communication in the scenario "parallel": iteration less computation.

    Exposed communication below a hundredth of the computation counts as 0, because waking a thread
    takes as long.
    """
    compute: float = found.of["compute_ms"]
    over = found.median - compute
    return over if over > compute / 100 else 0.0


def faster(rival: str, subject: str, least: float | None = None) -> Goal:
    """Make a goal for the rival's time divided by the subject's, as a mean over all rows.

    least: the ratio to reach; None: the ratio is shown, but not judged
    """
    return _ratio(rival, subject, least, "", lambda row: True)


def faster_where_the_link_is_not_the_bound(rival: str, subject: str, least: float) -> Goal:
    where = " where the link is not the bound"
    return _ratio(rival, subject, least, where, lambda row: not _at_the_bound(row, subject))


def faster_where_the_link_is_the_bound(rival: str, subject: str, least: float) -> Goal:
    where = " where the link is the bound"
    return _ratio(rival, subject, least, where, lambda row: _at_the_bound(row, subject))


def better_hidden(rival: str, subject: str, least: float) -> Goal:
    """Make a goal for the exposed communication, summed over all rows.

    The rival must have at least `least` times as much as the subject, unless the subject has none.
    """

    def look(rows: Sequence[Row]) -> Verdict | None:
        both = [row for row in rows if rival in row and subject in row]
        if not both:
            return None
        theirs = sum(not_hidden_ms(row[rival]) for row in both)
        ours = sum(not_hidden_ms(row[subject]) for row in both)
        none_left = sum(not_hidden_ms(row[subject]) == 0 for row in both)
        text = (
            f"not hidden, all rows together: {_written(theirs, rival)}, {_written(ours, subject)}"
        )
        if ours > 0:
            text += f", {theirs / ours:.1f} times less"
        text += f"; none in {none_left} of {len(both)} rows (≥ {least:g} times less, or none)"
        return Verdict(text, ours == 0 or theirs / ours >= least)

    return look


def _written(milliseconds: float, who: str) -> str:
    return f"{who} {format_time(milliseconds * 1e3) if milliseconds > 0 else 'none'}"


def _ratio(
    rival: str, subject: str, least: float | None, where: str, counts: Callable[[Row], bool]
) -> Goal:
    def look(rows: Sequence[Row]) -> Verdict | None:
        ratios = [
            row[rival].median / row[subject].median
            for row in rows
            if rival in row and subject in row and counts(row)
        ]
        if not ratios:
            return None
        mean = statistics.fmean(ratios)
        extremes = f"{min(ratios):.2f} to {max(ratios):.2f}"
        text = f"{rival} / {subject}{where}: mean {mean:.2f}, {extremes}"
        if least is None:
            return Verdict(text, None)
        return Verdict(f"{text} (≥ {least:g})", mean >= least)

    return look


def _at_the_bound(row: Row, subject: str) -> bool:
    return LINK in row and row[LINK].median >= _AT_THE_BOUND * row[subject].median
