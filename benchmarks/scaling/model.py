"""A model that extrapolates measurements on few ranks to many ranks.

A time grows with the number p of ranks as a + b p + c p^2. On this machine all ranks share k cores,
and b p + c p^2 is 1/k of the work of all ranks together. So each of the p ranks has k b + k c p of
work. If each rank has its own core, all ranks work in parallel, so the time is a + k b + k c p.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy

_POWERS = (0, 1, 2)
_FIRST_PAUSE = 50e-6  # the three pauses are as in csrc/bootstrap/key_value.cpp
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
        """Return the time if each rank has a core.

        cores: number of cores that the measured ranks shared.
        """
        return self.a + cores * self.b + cores * self.c * ranks


def fit(seconds: Mapping[int, float]) -> Growth:
    """Return the growth with the least sum of squared relative errors.

    Growths with a negative coefficient are excluded.

    seconds: the measured times, by number of ranks; at least two.
    """
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
    """Seconds of the c10d store, whose only thread answers one request after another.

    question: fixed cost of a request.
    seen: cost per key of a request that checks keys.
    read: cost per key of a request that reads values.
    """

    question: float
    seen: float
    read: float


def gathering(ranks: int, costs: StoreCosts, spread: float = 0.0) -> float:
    """Simulate a step in which every rank publishes a record and reads all records.

    It is the step of csrc/bootstrap/gather.h. Returns the seconds until the last rank has ended.

    spread: seconds over which the ranks' arrivals are evenly distributed.
    """
    longest = max(_LONGEST_PAUSE, _PAUSE_PER_KEY * ranks)
    free = end = 0.0  # time when the store's thread becomes free; time when the last rank ended
    published = 0
    # The next request of each rank: (time, rank, pause). Pause 0: the rank has not published.
    coming = [(spread * rank / ranks, rank, 0.0) for rank in range(ranks)]
    while coming:
        at, rank, pause = heapq.heappop(coming)
        free = max(at, free) + costs.question
        if pause == 0.0:
            published += 1
            heapq.heappush(coming, (free, rank, _FIRST_PAUSE))
            continue
        free += ranks * costs.seen
        if published < ranks:
            heapq.heappush(coming, (free + pause, rank, min(1.5 * pause, longest)))
        else:
            free += costs.question + ranks * costs.read
            end = free
    return end


def iteration(workers: int, service: float, computation: float, iterations: int = 5) -> float:
    """Simulate workers that exchange their model with boxes while they compute.

    A worker starts its next iteration when the exchange and the computation are complete. Returns
    the mean seconds of the last iteration.

    service: seconds that a box needs for one worker's share. All boxes serve the workers in the
        same order and for the same time, so one box is simulated.
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
