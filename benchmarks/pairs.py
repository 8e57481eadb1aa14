"""Pairs of samples: one thing in two states, measured by the same processes one after the other.

A pair has the microseconds of a call in the first and in the second state. The ratios are of the
two samples of a pair, the second over the first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import format_time
from torch_hbmcomm.bench.result import Measurement, sampled
from torch_hbmcomm.bench.summary import Summary

Pair = tuple[float, float]


def take(first: Callable[[], float], second: Callable[[], float], pairs: int) -> list[Pair]:
    """Take pairs. Every second pair takes the sample of the second state first."""
    found = []
    for number in range(pairs):
        if number % 2 == 0:
            before = first()
            found.append((before, second()))
        else:
            after = second()
            found.append((first(), after))
    return found


def slowest(of_ranks: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Return the pairs of a job: each sample is the time of the slowest rank."""
    return [
        (max(first for first, _ in each), max(second for _, second in each))
        for each in zip(*of_ranks, strict=True)
    ]


def measurements(
    of: Mapping[str, Any], states: tuple[str, str], pairs: Sequence[Pair]
) -> list[Measurement]:
    """Make the measurements of the two states. The second has the ratios as its values."""
    ratios = Summary.of([second / first for first, second in pairs])
    values = {
        "ratio_lower_quartile": ratios.lower_quartile,
        "ratio_median": ratios.median,
        "ratio_upper_quartile": ratios.upper_quartile,
    }
    return [
        sampled(of, states[0], [first for first, _ in pairs]),
        sampled(of, states[1], [second for _, second in pairs], values=values),
    ]


def table(title: str, name: str, states: tuple[str, str], found: Sequence[Measurement]) -> Table:
    """Return a table of the times and ratios. name: the field of Measurement.of that names rows."""
    first, second = states
    headings = (f"{first} (median)", f"{second} (median)", f"{second} / {first} (median)")
    made = report.table_of(title, (name, *headings, "quartiles"))
    for row in report.rows(found):
        ratios = row[second].values
        lower, upper = ratios["ratio_lower_quartile"], ratios["ratio_upper_quartile"]
        made.add_row(
            str(row[first].of[name]),
            format_time(row[first].median),
            format_time(row[second].median),
            f"{ratios['ratio_median']:.4f}",
            f"{lower:.4f} to {upper:.4f}",
        )
    return made
