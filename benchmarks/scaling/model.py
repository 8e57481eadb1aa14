"""A model that carries measurements on few ranks on to many.

A time grows with the ranks p as a + b p + c p^2. On this machine all ranks share its cores: b is
what each does for itself, and c what each does for every other. Where each rank has a core of its
own, the first is done by all at a time, and of the second each does its p.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy

_POWERS = (0, 1, 2)
_FIRST_PAUSE = 50e-6  # of csrc/bootstrap/key_value.cpp, as the two below
_LONGEST_PAUSE = 10e-3
_PAUSE_PER_KEY = 100e-6


@dataclass(frozen=True)
class Growth:
    """Seconds a + b p + c p^2."""

    a: float
    b: float
    c: float

    def here(self, ranks: int) -> float:
        return self.a + self.b * ranks + self.c * ranks**2

    def with_a_core_each(self, ranks: int, cores: int) -> float:
        """Return the time of ranks that have a core each. cores: that the measured ones shared."""
        return self.a + cores * self.b + cores * self.c * ranks


def fit(seconds: Mapping[int, float]) -> Growth:
    """Return the growth with the least sum of squared relative errors, of those without a negative
    coefficient. seconds: by the number of ranks, two numbers at least."""
    ranks = numpy.array(list(seconds), dtype=float)
    times = numpy.array(list(seconds.values()))
    best, least = Growth(0, 0, 0), float("inf")
    for count in range(1, min(len(_POWERS), len(times)) + 1):
        for powers in combinations(_POWERS, count):
            columns = numpy.stack([ranks**power / times for power in powers], axis=1)
            found = numpy.linalg.lstsq(columns, numpy.ones_like(times), rcond=None)[0]
            error = float(numpy.square(columns @ found - 1).sum())
            if (found >= 0).all() and error < least:
                coefficients = dict(zip(powers, found.tolist(), strict=True))
                best, least = Growth(*(coefficients.get(power, 0.0) for power in _POWERS)), error
    return best


@dataclass(frozen=True)
class StoreCosts:
    """Seconds of the c10d store, whose one thread answers one question after another.

    question: any, whatever it is about.
    seen, read: for each key that a question asks for, whether it is there, or what it holds.
    """

    question: float
    seen: float
    read: float


def gathering(ranks: int, costs: StoreCosts, spread: float = 0.0) -> float:
    """Simulate a step in which every rank tells something and reads what all told
    (csrc/bootstrap/gather.h). Returns the seconds until the last rank has ended.

    spread: seconds within which the ranks come, evenly.
    """
    longest = max(_LONGEST_PAUSE, _PAUSE_PER_KEY * ranks)
    free = end = 0.0  # when the store's thread has answered all so far; when the last rank ended
    told = 0
    coming = [(spread * rank / ranks, rank, 0.0) for rank in range(ranks)]  # 0: has told nothing
    while coming:
        at, rank, pause = heapq.heappop(coming)
        free = max(at, free) + costs.question
        if pause == 0.0:
            told += 1
            heapq.heappush(coming, (free, rank, _FIRST_PAUSE))
            continue
        free += ranks * costs.seen
        if told < ranks:
            heapq.heappush(coming, (free + pause, rank, min(1.5 * pause, longest)))
        else:
            free += costs.question + ranks * costs.read
            end = free
    return end


def iteration(workers: int, service: float, computation: float, iterations: int = 5) -> float:
    """Simulate workers that each exchange their model with boxes while they compute, and go on when
    both are done. Returns the mean seconds of a last iteration.

    service: seconds of a box for a worker's part; all boxes have as much to do, in the same order.
    """
    free = 0.0
    lengths: list[float] = []
    begins = [computation * worker / workers for worker in range(workers)]
    heapq.heapify(begins)
    for _ in range(iterations * workers):
        begin = begins[0]
        free = max(begin, free) + service
        end = max(begin + computation, free)
        heapq.heapreplace(begins, end)
        lengths.append(end - begin)
    return sum(lengths[-workers:]) / workers
