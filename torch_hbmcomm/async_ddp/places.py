"""Where each gradient lies in the boxes, and in which pieces a bucket travels.

The parameters of one dtype follow one another in a *space*, in the reverse of the model's order:
about the order in which backward() finishes them, so that what shares a bucket lies together.
Blocks of a space are dealt to the boxes in turn, so that a large bucket uses all boxes at once. All
this depends on the parameters alone, not on DDP's buckets, which change after the first iteration.

Offsets and counts are elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_BLOCK = 1 << 19
LONGEST_RUN = 1 << 16  # few enough to be worked on within a processor's cache


@dataclass(frozen=True)
class Run:
    """Neighbours in a bucket as well as in the space."""

    at: int  # in the bucket
    begin: int  # in the space
    count: int


@dataclass(frozen=True)
class Piece:
    """Neighbours in one box, and so in the space."""

    box: int
    at: int  # in the box's part of the space
    begin: int  # in the space
    count: int
    runs: tuple[Run, ...]


class Space:
    """counts: of each parameter's elements, by name, in the model's order."""

    def __init__(self, counts: Mapping[str, int], boxes: int) -> None:
        self._boxes = boxes
        self.ranges: dict[str, slice] = {}
        self.count = 0
        for name, count in reversed(list(counts.items())):
            self.ranges[name] = slice(self.count, self.count + count)
            self.count += count
        self._block = max(1, min(_BLOCK, -(-self.count // boxes)))

    @property
    def room(self) -> int:
        """Elements that each box has room for; at least one."""
        blocks = -(-self.count // self._block)
        return max(1, -(-blocks // self._boxes)) * self._block

    def whole(self) -> list[Piece]:
        """The space itself, taken as one bucket."""
        return self._pieces([Run(0, 0, self.count)])

    def bucket(self, names: Sequence[str]) -> list[Piece]:
        """A bucket that has these parameters in this order."""
        runs = []
        at = 0
        for name in names:
            place = self.ranges[name]
            runs.append(Run(at, place.start, place.stop - place.start))
            at += place.stop - place.start
        return self._pieces(sorted(runs, key=lambda run: run.begin))

    def _pieces(self, runs: Sequence[Run]) -> list[Piece]:
        together: list[list[Run]] = []
        for run in self._by_block(runs):
            last = together[-1][-1] if together else None
            if last is None or last.begin + last.count != run.begin or run.begin % self._block == 0:
                together.append([run])
            elif last.at + last.count == run.at:
                together[-1][-1] = Run(last.at, last.begin, last.count + run.count)
            else:
                together[-1].append(run)
        return [self._piece(parts) for parts in together]

    def _by_block(self, runs: Sequence[Run]) -> Iterator[Run]:
        for run in runs:
            at, begin, end = run.at, run.begin, run.begin + run.count
            while begin < end:
                some = min(end - begin, self._block - begin % self._block)
                yield Run(at, begin, some)
                at, begin = at + some, begin + some

    def _piece(self, parts: Sequence[Run]) -> Piece:
        begin = parts[0].begin
        block, inside = divmod(begin, self._block)
        turn, box = divmod(block, self._boxes)
        runs = tuple(
            Run(part.at + step, part.begin + step, min(LONGEST_RUN, part.count - step))
            for part in parts
            for step in range(0, part.count, LONGEST_RUN)
        )
        return Piece(box, turn * self._block + inside, begin, sum(run.count for run in runs), runs)
