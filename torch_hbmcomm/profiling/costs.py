"""Computes the costs of communication: time in transit, hidden, and waited for late ranks.

A group runs its collectives one after the other. So a rank is *ready* for a collective when the
rank has issued it, and the collective before it has ended. A rank waits for the last rank that was
ready before the collective's end on the waiting rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from torch_hbmcomm.profiling.clocks import MEETINGS, Clock, collectives
from torch_hbmcomm.profiling.ranks import RankProfile

Intervals = list[tuple[int, int]]
_OfRank = tuple[int, int]  # a rank, and the id() of its operation
_Where = tuple[str, str, str, str, str]  # the first fields of a Row
_Kind = tuple[str, str, str]  # the first of these fields, up to the path

_CLASSES = ((4 << 10, "to 4 KiB"), (64 << 10, "to 64 KiB"), (1 << 20, "to 1 MiB"),
            (16 << 20, "to 16 MiB"))  # fmt: skip
_SMALL, _MEDIUM = _CLASSES[0][1], _CLASSES[1][1]
# A rank is late much more than others if its share of the waiting is at least
# min(_MUCH_MORE / number of ranks, _MOST_OF_ALL).
_MUCH_MORE = 2
_MOST_OF_ALL = 0.75  # with 2 ranks, where twice an equal share would be all of the waiting
_MOST_NAMES = 8  # of ranks, in a line
# Kinds that copy their tensors, wherever these are.
_ALWAYS_STAGED = ("all_reduce_coalesced", "all_reduce_sparse")


def size_class(size: int) -> str:
    return next((name for most, name in _CLASSES if size <= most), "over 16 MiB")


@dataclass
class Row:
    """The operations of all ranks of one kind, size class, path, place and data.

    Times: ns, sums over all ranks.
    """

    kind: str
    size: str
    path: str
    place: str
    data: str
    calls: int = 0
    bytes: int = 0
    transit: int = 0
    hidden: int = 0
    waiting: int = 0  # for late ranks
    last: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # of it, by late rank
    transfers: list[int] = field(default_factory=list)  # of each call, once all ranks were ready
    unhidden: int = 0  # of these transfers


@dataclass
class Late:
    """How often other ranks waited for a rank. Times: ns."""

    collectives: int = 0  # in which the rank took part
    times: int = 0  # in which another rank waited for it
    late: list[int] = field(default_factory=list)  # the longest of these waits, for each collective
    waiting: int = 0  # of all other ranks for this one, that no computation hid

    @property
    def half(self) -> tuple[int, int]:
        """How many of the longest delays make up half of the sum of `late`, and the shortest of
        those. Many short delays, which all ranks have, hardly change it."""
        whole = sum(self.late)
        reached = count = least = 0
        for least in sorted(self.late, reverse=True):
            count, reached = count + 1, reached + least
            if 2 * reached >= whole:
                break
        return count, least


@dataclass
class Staged:
    """The operations of all ranks of one kind, size class and path whose data were staged because
    a tensor of some rank was outside of the segment. Times: ns, sums over all ranks."""

    ranks: set[int] = field(default_factory=set)  # the ranks with such a tensor
    calls: int = 0
    transfers: list[int] = field(default_factory=list)  # of each call, once all ranks were ready
    unhidden: int = 0  # of these transfers


@dataclass
class Costs:
    """Times: ns."""

    rows: list[Row]
    late: dict[int, Late]
    duration: dict[int, int]  # of the profile of each rank
    waiting: dict[int, int]  # of each rank for late ranks, that no computation hid
    unhidden: dict[int, int]  # of each rank: in transit, neither hidden nor waiting
    staged: dict[_Kind, Staged]
    waited: dict[_OfRank, tuple[int, int]]  # in an operation: for which late rank, and how long


def costs(profiles: Sequence[RankProfile], clocks: dict[int, Clock]) -> Costs:
    late = {one.rank: Late() for one in profiles}
    ready = {key: time for one in profiles for key, time in _ready(one)}
    waits = _waits(profiles, clocks, ready, late)
    outside = _outside(profiles)
    rows: dict[_Where, Row] = {}
    staged: dict[_Kind, Staged] = defaultdict(Staged)
    waiting, unhidden, waited_in = {}, {}, {}
    for profile in profiles:
        bare: Intervals = []
        waited: dict[int, Intervals] = defaultdict(list)
        of_row: dict[_Where, Intervals] = defaultdict(list)
        of_staged: dict[_Kind, Intervals] = defaultdict(list)
        for one in profile.operations:
            begin = ready[profile.rank, id(one)]
            last, until = waits.get((profile.rank, id(one)), (-1, begin))
            where = (one.kind, size_class(one.size), one.path, one.place, one.data)
            row = rows.setdefault(where, Row(*where))
            row.calls += 1
            row.bytes += one.size
            row.transit += one.transit
            row.hidden += one.hidden
            row.waiting += until - begin
            row.transfers.append(one.end - until)
            seen = max(begin, one.begin + one.hidden)  # computation hides the operation until here
            bare.append((seen, one.end))
            of_row[where].append((max(seen, until), one.end))
            if by := outside.get((profile.rank, id(one))):
                kind = where[:3]
                staged[kind].ranks |= by
                staged[kind].calls += 1
                staged[kind].transfers.append(one.end - until)
                of_staged[kind].append((max(seen, until), one.end))
            if last >= 0:
                waited_in[profile.rank, id(one)] = (last, until - begin)
                row.last[last] += until - begin
                waited[last].append((seen, until))
        for where, intervals in of_row.items():
            rows[where].unhidden += _length(intervals)
        for kind, intervals in of_staged.items():
            staged[kind].unhidden += _length(intervals)
        for last, intervals in waited.items():
            late[last].waiting += _length(intervals)
        waiting[profile.rank] = _length(each for one in waited.values() for each in one)
        unhidden[profile.rank] = _length(bare) - waiting[profile.rank]
    ordered = sorted(rows.values(), key=lambda row: -row.transit)
    duration = {one.rank: one.end - one.begin for one in profiles}
    return Costs(ordered, late, duration, waiting, unhidden, staged, waited_in)


def _outside(profiles: Sequence[RankProfile]) -> dict[_OfRank, set[int]]:
    """Return the operations that could be zero-copy and are not, each with the ranks whose tensors
    are outside of the segment. Such a tensor also stages the data of the other ranks."""
    ordinary: dict[_OfRank, set[int]] = {}
    for by_rank in collectives(profiles):
        ranks = {rank for rank, one in by_rank.items() if one.place == "ordinary"}
        ordinary.update(((rank, id(one)), ranks) for rank, one in by_rank.items())
    found = {}
    for profile in profiles:
        for one in profile.operations:
            own = {profile.rank} if one.place == "ordinary" else set()
            by = ordinary.get((profile.rank, id(one)), own)
            could = one.path == "shm" and one.place != "device" and one.kind not in _ALWAYS_STAGED
            large = size_class(one.size) not in (_SMALL, _MEDIUM)
            if by and could and large and "staged" in one.data:
                found[profile.rank, id(one)] = by
    return found


def _ready(profile: RankProfile) -> Iterable[tuple[_OfRank, int]]:
    """Yield when the rank was ready for each of its operations."""
    ended: dict[str, int] = {}
    for one in sorted(profile.operations, key=lambda one: one.sequence):
        begin = one.begin
        if one.sequence:
            begin = min(max(begin, ended.get(one.group.key, begin)), one.end)
            ended[one.group.key] = one.end
        yield (profile.rank, id(one)), begin


def _waits(
    profiles: Sequence[RankProfile],
    clocks: dict[int, Clock],
    ready: dict[_OfRank, int],
    late: dict[int, Late],
) -> dict[_OfRank, tuple[int, int]]:
    """Return the rank for which each rank waited in a collective, and until when by its own clock.

    Counts the late ranks in `late`. A difference below the error of the clocks counts as none.
    """
    found = {}
    for by_rank in collectives(profiles):
        times = {rank: clocks[rank].shared(ready[rank, id(one)]) for rank, one in by_rank.items()}
        longest: dict[int, int] = defaultdict(int)
        for rank, one in by_rank.items():
            late[rank].collectives += 1
            end = clocks[rank].shared(one.end)
            later: list[tuple[int, int]] = []  # times, with their ranks
            for other, time in times.items():
                error = clocks[rank].error_to(clocks[other])
                in_flight = one.kind in MEETINGS or _is_later(end - time, error)
                if in_flight and _is_later(time - times[rank], error):
                    later.append((time, other))
            if not later:
                continue
            time, last = max(later)
            until = min(one.end, clocks[rank].own(time))
            found[rank, id(one)] = (last, until)
            longest[last] = max(longest[last], time - times[rank])
        for last, most in longest.items():
            late[last].times += 1
            late[last].late.append(most)
    return found


def _is_later(difference: int, error: int | None) -> bool:
    return error is not None and difference > error


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total, reached = 0, None
    for begin, end in sorted(intervals):
        begin = begin if reached is None else max(begin, reached)
        if end > begin:
            total += end - begin
            reached = end
    return total


@dataclass(frozen=True)
class Advice:
    share: float  # of the ranks' time: the most that the change can save
    text: str
    unhidden: int = 0  # ns of the operations that it names


def advice(found: Costs) -> list[Advice]:
    """Return what to change first: three or fewer, each of at least 1 % of the time."""
    whole = sum(found.duration.values()) or 1
    named = _worth([*_staged(found, whole), *_small(found, whole)])
    others = _worth([*_late_ranks(found, whole), *_bare(found, named, whole)])
    return sorted(others + named, key=lambda one: -one.share)[:3]


def _worth(found: Iterable[Advice]) -> list[Advice]:
    return [one for one in found if one.share >= 0.01]


def _late_ranks(found: Costs, whole: int) -> Iterable[Advice]:
    total = sum(each.waiting for each in found.late.values())
    rank, worst = max(found.late.items(), key=lambda item: item[1].waiting)
    if not worst.waiting:
        return
    share = worst.waiting / total
    if share < min(_MUCH_MORE / len(found.late), _MOST_OF_ALL):
        yield Advice(
            total / whole,
            f"Waiting for late ranks takes {total / whole:.0%} of the time, and no rank is late "
            f"much more than others (most waiting: rank {rank}, {share:.0%}). Give all ranks the "
            "same work in each step, and look for other programs on their processors.",
        )
        return
    count, least = worst.half
    yield Advice(
        worst.waiting / whole,
        f"{share:.0%} of the waiting for late ranks is for rank {rank} "
        f"({worst.waiting / whole:.0%} of the time). Others waited for it in {worst.times} of "
        f"{worst.collectives} collectives. Half of its delay is in {count} of them, by "
        f"{_milliseconds(least)} or more (at most {_milliseconds(max(worst.late))}). Look for what "
        "slows this rank: its share of the data, its machine, other programs on its processors, or "
        "work that it does in some steps only, such as evaluating.",
    )


def _milliseconds(nanoseconds: float) -> str:
    value = nanoseconds / 1e6
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.2g} ms"


def _bare(found: Costs, named: Sequence[Advice], whole: int) -> Iterable[Advice]:
    """Advise about the operations that no advice of `named` names."""
    unhidden = sum(found.unhidden.values()) - sum(one.unhidden for one in named)
    share = unhidden / whole
    yield Advice(
        share,
        f"{'Other communication' if named else 'Communication'} that no computation hides takes "
        f"{share:.0%} of the time, without the waiting for late ranks. Issue operations earlier "
        "and wait for them later (async_op=True), let DDP overlap them with the backward pass, or "
        'send less ("Which way to train" in docs/README.md).',
    )


def _staged(found: Costs, whole: int) -> Iterable[Advice]:
    zero_copy: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for row in found.rows:
        if row.data == "zero-copy" and row.place != "device":
            zero_copy[row.kind, row.size, row.path] += row.transfers
    for (kind, size, path), each in found.staged.items():
        share = each.unhidden / whole
        text = f"{kind}, {size}, of tensors outside of the segment"
        if len(each.ranks) < len(found.duration):
            text += f" on {_names(each.ranks)}"
        text += f" takes {share:.0%} of the time ({each.calls} calls, whose data is staged)"
        better = zero_copy.get((kind, size, path))
        if better:
            ratio = median(each.transfers) / max(median(better), 1)
            if ratio <= 1:
                continue
            share *= 1 - 1 / ratio
            text += f", {ratio:.1f} times as long for each call as zero-copy"
            text += f", which saves {share:.0%}"
        yield Advice(
            share,
            f"{text}. If the tensors live for many operations, allocate them with "
            "hbmcomm.memory.empty on all ranks, or set HBMCOMM_ALLOCATOR=segment.",
            each.unhidden,
        )


def _names(ranks: set[int]) -> str:
    if len(ranks) > _MOST_NAMES:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _small(found: Costs, whole: int) -> Iterable[Advice]:
    for row in found.rows:
        share = row.unhidden / whole
        many = row.calls > len(found.duration)
        if row.size == _SMALL and many and row.kind not in ("barrier", "all_reduce_sparse"):
            yield Advice(
                share,
                f"{row.calls} calls of {row.kind}, {row.size}, take {share:.0%} of the time. "
                "Join their tensors into one.",
                row.unhidden,
            )


def slowest(row: Row) -> tuple[int, float] | None:
    """Return the rank for which the row's ranks waited longest, and its share of the waiting."""
    if not row.last or not row.waiting:
        return None
    rank = max(row.last, key=lambda one: row.last[one])
    return rank, row.last[rank] / row.waiting
