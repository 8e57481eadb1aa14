"""Puts the times of all ranks on one axis.

Ranks of one machine share a clock. The clocks of two machines are compared by the collectives that
no rank can end before all have issued them, such as all_reduce. On each of two machines such a
collective ends after its issue on the other machine. The two facts bound the difference of the
clocks from both sides, each at a time (drift.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch_hbmcomm.profiling import drift
from torch_hbmcomm.profiling.ranks import Operation, RankProfile

MEETINGS = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "barrier",
)
"""Collectives that no rank can end before all ranks have issued them."""


@dataclass(frozen=True)
class Difference:
    """From the time `begin` of the first rank's clock on, a clock shows `offset` more than that
    clock at `begin`, and gains `drift` ns in each ns. Times: ns."""

    begin: int
    offset: int
    drift: float = 0.0

    def own(self, shared: int) -> int:
        return shared + self.offset + round((shared - self.begin) * self.drift)

    def shared(self, own: int) -> int:
        since = own - self.offset - self.begin
        return self.begin + since - round(since * self.drift / (1 + self.drift))


@dataclass(frozen=True)
class Clock:
    """A clock, and its difference to the clock of the first rank. Times: ns."""

    name: str
    error: int | None  # of the difference; None: no bound is known
    differences: tuple[Difference, ...] = (Difference(0, 0),)  # by their begins
    drift: float = 0.0  # the fastest change of the difference that is more than its error

    def shared(self, own: int) -> int:
        """Return the time of the first rank's clock when this one shows `own`."""
        return self.differences[max(0, bisect_right(self._own_begins, own) - 1)].shared(own)

    def own(self, shared: int) -> int:
        """Return the time of this clock when the first rank's one shows `shared`."""
        return self.differences[max(0, bisect_right(self._begins, shared) - 1)].own(shared)

    @cached_property
    def _begins(self) -> list[int]:
        return [one.begin for one in self.differences]

    @cached_property
    def _own_begins(self) -> list[int]:
        return [one.own(one.begin) for one in self.differences]

    def error_to(self, other: Clock) -> int | None:
        """Return the largest error of a difference between times of the two clocks."""
        if self.name == other.name:
            return 0
        if self.error is None or other.error is None:
            return None
        return self.error + other.error


def collectives(profiles: Sequence[RankProfile]) -> Iterator[dict[int, Operation]]:
    """Yield each collective that all ranks of its group have recorded, by rank."""
    found: dict[tuple[str, int], dict[int, Operation]] = defaultdict(dict)
    for profile in profiles:
        for one in profile.operations:
            if one.sequence:
                found[one.group.key, one.sequence][profile.rank] = one
    for by_rank in found.values():
        if len(by_rank) == len(next(iter(by_rank.values())).group.ranks) > 1:
            yield by_rank


def meetings(profiles: Sequence[RankProfile]) -> Iterator[dict[int, Operation]]:
    """Yield the collectives() of MEETINGS."""
    for by_rank in collectives(profiles):
        if all(one.kind in MEETINGS for one in by_rank.values()):
            yield by_rank


def align(profiles: Sequence[RankProfile]) -> dict[int, Clock]:
    """Return the clock of each rank."""
    first = profiles[0]
    bounds = _bounds(profiles, first.clock)
    clocks = {first.clock: Clock(first.clock, 0)}
    for profile in profiles:
        name = profile.clock
        if name in bounds:
            clocks.setdefault(name, _compared(name, bounds[name], profiles))
        else:
            apart = Difference(first.begin, profile.begin - first.begin)
            clocks.setdefault(name, Clock(name, None, (apart,)))
    return {one.rank: clocks[one.clock] for one in profiles}


def _bounds(profiles: Sequence[RankProfile], first: str) -> dict[str, list[drift.Bounds]]:
    """Return, for each clock that meets the clock `first`, the bounds of the difference, in the
    order of time."""
    clock_of = {one.rank: one.clock for one in profiles}
    found: dict[str, list[drift.Bounds]] = defaultdict(list)
    for by_rank in meetings(profiles):
        here = [one for rank, one in by_rank.items() if clock_of[rank] == first]
        if not here:
            continue
        end, begin = min(one.end for one in here), max(one.begin for one in here)
        for rank, there in by_rank.items():
            if clock_of[rank] != first:
                least, most = (end, there.begin - end), (begin, there.end - begin)
                found[clock_of[rank]].append(drift.Bounds(least, most))
    return {name: sorted(each, key=lambda one: one.most) for name, each in found.items()}


def _compared(name: str, bounds: list[drift.Bounds], profiles: Sequence[RankProfile]) -> Clock:
    """Return a clock that has bounds. Times and differences are counted from those of the first
    bound, since a float has no room for all ns since the machine's start."""
    time, offset = map(int, bounds[0].most)
    times: list[int] = []  # of the operations
    for profile in profiles:
        if profile.clock in (name, profiles[0].clock):
            zero = time + (offset if profile.clock == name else 0)
            times += [each - zero for one in profile.operations for each in (one.begin, one.end)]
    counted = [
        drift.Bounds(
            (one.least[0] - time, one.least[1] - offset), (one.most[0] - time, one.most[1] - offset)
        )
        for one in bounds
    ]
    found = drift.lines(counted, min(times), max(times))
    return Clock(
        name,
        math.ceil(max(one.error for one in found)),
        tuple(
            Difference(time + round(one.begin), offset + round(one.at_begin), one.drift)
            for one in found
        ),
        max((abs(one.drift) for one in found if one.change > 2 * one.error), default=0.0),
    )
