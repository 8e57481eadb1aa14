"""Puts the times of all ranks on one axis.

Ranks of one machine share a clock. The clocks of two machines are compared by the collectives that
no rank can end before all have issued them, such as all_reduce. On each of two machines such a
collective ends after its issue on the other machine. The two facts bound the difference of the
clocks from both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
class Clock:
    """The difference between a clock and the clock of the first rank. Times: ns."""

    name: str
    offset: int  # subtracted from a time of this clock
    error: int | None  # the offset is wrong by at most this; None: no bound is known

    def error_to(self, other: Clock) -> int | None:
        """Return the largest error of a difference between times of the two clocks."""
        if self.name == other.name:
            return 0
        if self.error is None or other.error is None:
            return None
        return self.error + other.error


def meetings(profiles: Sequence[RankProfile]) -> Iterator[dict[int, Operation]]:
    """Yield each collective of MEETINGS that all ranks of its group have recorded, by rank."""
    found: dict[tuple[str, int], dict[int, Operation]] = defaultdict(dict)
    for profile in profiles:
        for one in profile.operations:
            if one.kind in MEETINGS and one.sequence:
                found[one.group.key, one.sequence][profile.rank] = one
    for by_rank in found.values():
        if len(by_rank) == len(next(iter(by_rank.values())).group.ranks) > 1:
            yield by_rank


def align(profiles: Sequence[RankProfile]) -> dict[int, Clock]:
    """Return the clock of each rank."""
    clock_of = {one.rank: one.clock for one in profiles}
    first = profiles[0]
    least: dict[str, int] = {}  # bounds of each clock's offset
    most: dict[str, int] = {}
    for by_rank in meetings(profiles):
        here = [one for rank, one in by_rank.items() if clock_of[rank] == first.clock]
        if not here:
            continue
        end, begin = min(one.end for one in here), max(one.begin for one in here)
        for rank, there in by_rank.items():
            clock = clock_of[rank]
            if clock != first.clock:
                least[clock] = max(least.get(clock, there.begin - end), there.begin - end)
                most[clock] = min(most.get(clock, there.end - begin), there.end - begin)
    clocks = {first.clock: Clock(first.clock, 0, 0)}
    for profile in profiles:
        if profile.clock in clocks:
            continue
        if profile.clock in least:
            low, high = least[profile.clock], most[profile.clock]
            # If the clocks drift, the bounds exclude one another.
            error = (high - low) // 2 if high >= low else low - high
            clocks[profile.clock] = Clock(profile.clock, (low + high) // 2, error)
        else:
            clocks[profile.clock] = Clock(profile.clock, profile.begin - first.begin, None)
    return {one.rank: clocks[one.clock] for one in profiles}
