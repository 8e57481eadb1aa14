"""One worker's traffic with the boxes, within the bound on staleness.

Threads: one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.layout import Piece
from torch_hbmcomm.parameter_server.roster import Roster
from torch_hbmcomm.parameter_server.shards import Shards

_SENDS = 2  # pieces at a time to a box; measured over 1 Gbit/s, see benchmarks/README.md


class Exchange:
    """staleness: how many exchanges a worker may be ahead of the slowest one; None: any number.

    An exchange pushes and pulls once each, in either order. With staleness 0 nobody pushes before
    all have pulled, nor pulls before all have pushed.
    """

    def __init__(self, shards: Shards, roster: Roster, staleness: int | None) -> None:
        self._shards = shards
        self._roster = roster
        self._staleness = staleness
        self._pushed = self._pulled = 0

    def begin(self, clock: int) -> None:
        """Counts from here, where the foremost is; waits for those that are too far behind."""
        self._pushed = self._pulled = clock
        if self._staleness is not None:
            self._roster.wait_pushed(clock - self._staleness)

    def push(self, pieces: Sequence[Piece], scale: Callable[[Piece], float]) -> None:
        """Adds the slots to the weights, and waits for those that are too far behind."""
        if self._staleness is not None:
            self._roster.wait_pulled(self._pulled - self._staleness)
        self.add(pieces, scale)
        self._count_push()

    def pull(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Each piece, as soon as its weights are here."""
        arrivals = [self._shards.pull(piece) for piece in pieces]
        for piece, futures in zip(pieces, arrivals, strict=True):
            _wait(futures)
            yield piece
        self._count_pull()

    def push_and_pull(
        self, pieces: Sequence[Piece], scale: Callable[[Piece], float]
    ) -> Iterator[Piece]:
        """Each piece, as soon as its weights with the difference in them are here.

        Without a bound on staleness, pieces go both ways at once.
        """
        if self._staleness is not None:
            self.push(pieces, scale)
            yield from self.pull(pieces)
            return
        arrivals = []
        for piece, added in self._add_each(pieces, scale):
            arrivals.append([added, *self._shards.pull(piece)])
        for piece, futures in zip(pieces, arrivals, strict=True):
            _wait(futures)
            yield piece
        self._count_push()
        self._count_pull()

    def add(self, pieces: Sequence[Piece], scale: Callable[[Piece], float]) -> None:
        """As push(), outside of any exchange: no clock moves, and nobody is waited for."""
        _wait([added for _, added in self._add_each(pieces, scale)])

    def prefetch(self, pieces: Sequence[Piece]) -> None:
        """As pull(), outside of any exchange."""
        for futures in [self._shards.pull(piece) for piece in pieces]:
            _wait(futures)

    def lead(self) -> int:
        """Exchanges that this worker is ahead of the slowest."""
        return max((self._pushed - line.pushed for line in self._roster.active()), default=0)

    def _add_each(
        self, pieces: Sequence[Piece], scale: Callable[[Piece], float]
    ) -> Iterator[tuple[Piece, smb.Future]]:
        """Sends a few pieces at a time: those that are under way together share the connections and
        arrive together, and nothing could come back meanwhile."""
        sending: deque[smb.Future] = deque()
        for piece in pieces:
            if len(sending) == _SENDS * self._shards.boxes:
                sending.popleft().result()
            if (sent := self._shards.send(piece)) is not None:
                sending.append(sent)
            yield piece, self._shards.add(piece, scale(piece))
        _wait(sending)

    def _count_push(self) -> None:
        self._pushed += 1
        self._roster.set_pushed(self._pushed)
        if self._staleness is not None:
            self._roster.wait_pushed(self._pushed - self._staleness)

    def _count_pull(self) -> None:
        self._pulled += 1
        self._roster.set_pulled(self._pulled)


def _wait(futures: Iterable[smb.Future]) -> None:
    for future in futures:
        future.result()
