"""Gradients with known sums.

They are integers, which are exact in float32 while their sums stay below 2**24. Neighbouring
elements differ, so that the checks detect misplaced data.
"""

from typing import Any

import numpy as np

_PERIOD = 1021  # a prime: no chunk has a whole number of periods
_BLOCK = 256 * _PERIOD  # elements that are checked together; fits into a cache
_MOST_BLOCKS = 32  # blocks that a worker checks

Array = np.ndarray[Any, Any]
"""An array of float32."""

MOST = 2**24 // _PERIOD
"""The largest factor with which every element of multiple() is exact in float32."""


def multiple(count: int, factor: int) -> Array:
    """Return `count` gradients, times a factor."""
    made = np.empty(count, np.float32)
    block = _block(factor)
    for start in range(0, count, _BLOCK):
        part = made[start : start + _BLOCK]
        part[:] = block[: len(part)]
    return made


def multiple_of_all(workers: int) -> int:
    """Return the sum of one push of every worker, as a multiple of worker 0's gradients."""
    return workers * (workers + 1) // 2


def check_multiple(weights: Array, factor: int) -> None:
    """Raise RuntimeError unless the weights are the sum of `factor` pushes of worker 0."""
    expected = _block(factor)
    for start in range(0, len(weights), _BLOCK):
        found = weights[start : start + _BLOCK]
        wrong = np.flatnonzero(found != expected[: len(found)])
        if len(wrong) > 0:
            at = int(wrong[0])
            raise RuntimeError(
                f"the sum is wrong: element {start + at} is {found[at]}, not {expected[at]}"
            )


def check_between(weights: Array, least: int, most: int) -> None:
    """Raise RuntimeError if a weight is not between two multiples of worker 0's gradients.

    Checks at most _MOST_BLOCKS blocks, spread over the array.
    """
    low, high = _block(least), _block(most)
    blocks = -(-len(weights) // _BLOCK)
    for number in range(0, blocks, -(-blocks // _MOST_BLOCKS)):
        found = weights[number * _BLOCK : (number + 1) * _BLOCK]
        if not ((low[: len(found)] <= found) & (found <= high[: len(found)])).all():
            raise RuntimeError(
                f"fetched weights are outside of {least} to {most} times the gradients"
            )


def _block(factor: int) -> Array:
    period = np.arange(1, _PERIOD + 1, dtype=np.float32) * np.float32(factor)
    return np.tile(period, _BLOCK // _PERIOD)
