"""Contenders take turns, and every call that is not very short is timed by itself.

A sample is the time of a single call. For a short call it would include too much of the time of
reading the clock. So calls shorter than BATCH_SECONDS are timed in batches of about that length,
and a sample is the mean of a batch. Longer calls are not batched, because a mean would hide their
spread: a call of Gloo takes 0.1 ms, or 0.8 ms if its threads must be woken.

Contenders that follow one another in a round also disturb one another: threads that spin or wake up
late take time from the next contender. So each contender is also measured alone: in rounds without
the others.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat

BATCH_SECONDS = 10e-6
MOST_SAMPLES = 20  # in one turn of a contender
_TURN_SECONDS = 10e-3  # long against the skew with which ranks leave a barrier
_FEW, _MANY = 3, 30  # numbers of trial calls, if calls are slow and if they are fast
_SLOW = 100_000  # nanoseconds from which a call is slow

Timed = Callable[[int, int], Sequence[float]]
"""A loop that takes a number of samples, and the calls in each. Returns, for each sample, the
microseconds that a call took. Before the samples it makes one untimed call, to warm up buffers and
threads."""


@dataclass
class Samples:
    """The times of one contender's calls, in microseconds for each call.

    interleaved: the times in rounds with the other contenders.
    alone: the times in rounds without the others, if there were such rounds.
    calls: the calls in each sample; 1, or more for short calls.
    """

    calls: int = 1
    interleaved: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


def timed(call: Callable[[], object]) -> Timed:
    """Make the loop of a Python function."""

    def run(samples: int, calls: int) -> list[float]:
        found = []
        call()
        for _ in range(samples):
            start = time.perf_counter()
            for _ in repeat(None, calls):
                call()
            found.append((time.perf_counter() - start) / calls * 1e6)
        return found

    return run


def _nothing() -> None:
    """Do nothing: one process needs no barrier."""


def interleave(
    contenders: Mapping[str, Timed],
    rounds: int,
    alone: Collection[str] | None = None,
    barrier: Callable[[], None] = _nothing,
    agree: Callable[[int], int] = int,
    most_samples: int = MOST_SAMPLES,
) -> dict[str, Samples]:
    """Measure all contenders interleaved, then some of them alone.

    Args:
        rounds: the number of rounds; in each, every contender has a turn
        alone: the contenders that are also measured alone, for `rounds` turns; None: all of them,
            if there are several
        barrier: called before each turn; ranks that measure together wait in it for each other
        agree: called by each rank with a number of its own; returns the same number on all ranks
        most_samples: the largest number of samples in a turn
    """
    turns = {name: _turn(found, barrier, agree, most_samples) for name, found in contenders.items()}
    samples = {name: Samples(calls=calls) for name, (_, calls) in turns.items()}
    if alone is None:
        alone = contenders if len(contenders) > 1 else ()
    with _without_collector():
        for _ in range(rounds):
            for name, found in contenders.items():
                barrier()
                samples[name].interleaved += found(*turns[name])
        for name, found in contenders.items():
            for _ in range(rounds if name in alone else 0):
                barrier()
                samples[name].alone += found(*turns[name])
    return samples


def _turn(
    found: Timed, barrier: Callable[[], None], agree: Callable[[int], int], most: int
) -> tuple[int, int]:
    """Return the number of samples in a turn, and of calls in each sample."""
    for trials, enough in ((_FEW, _SLOW), (_MANY, 0)):
        barrier()
        nanoseconds = agree(max(1, round(statistics.median(found(trials, 1)) * 1e3)))
        if nanoseconds >= enough:
            break
    calls = max(1, math.ceil(BATCH_SECONDS * 1e9 / nanoseconds))
    return max(1, min(most, int(_TURN_SECONDS * 1e9 / (calls * nanoseconds)))), calls


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
