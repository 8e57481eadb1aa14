"""The growth of each measured quantity, checked on the largest number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.scaling.model import Growth, fit
from torch_hbmcomm.bench.result import Measurement

FEWEST = 3  # numbers of ranks: two to fit, one to check


def growths(
    found: Sequence[Measurement],
) -> Iterator[tuple[str, str, dict[int, float], Growth, float]]:
    """Yield the growth of each quantity and contender.

    An item has:

    - the quantity
    - the contender
    - the medians in seconds, by number of ranks
    - the growth, fitted to all numbers of ranks except the largest
    - the predicted time at the largest number of ranks, divided by the measured time
    """
    medians: dict[tuple[str, str], dict[int, float]] = {}
    for one in found:
        row = medians.setdefault((one.of["quantity"], one.contender), {})
        row[one.of["ranks"]] = one.median / 1e3
    for (quantity, contender), row in medians.items():
        if len(row) < FEWEST:
            continue
        largest = max(row)
        growth = fit({ranks: seconds for ranks, seconds in row.items() if ranks != largest})
        yield quantity, contender, row, growth, growth.here(largest) / row[largest]
