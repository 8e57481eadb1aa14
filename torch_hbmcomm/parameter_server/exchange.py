"""One worker's traffic with the boxes, within the bound on staleness.

Threads: one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.layout import Piece
from torch_hbmcomm.parameter_server.roster import Roster
from torch_hbmcomm.parameter_server.shards import Shards

if TYPE_CHECKING:  # it needs PyTorch, which exchanges do without
    from torch_hbmcomm.parameter_server.versions import Versions

_SENDS = 2  # pieces at a time to a box; measured over 1 Gbit/s, see benchmarks/README.md


class Exchange:
    """An exchange pushes and pulls once each, in either order. With staleness 0 nobody pushes
    before all have pulled, nor pulls before all have pushed.

    Args:
        changing: the pieces that are exchanged
        versions: of layers, where some are dropped
        staleness: how many exchanges a worker may be ahead of the slowest one; None: any number
    """

    def __init__(
        self,
        shards: Shards,
        roster: Roster,
        changing: Sequence[Piece],
        versions: Versions | None,
        staleness: int | None,
    ) -> None:
        self._shards = shards
        self._roster = roster
        self._changing = changing
        self._versions = versions
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
        """Each piece, as soon as its weights with the difference in them are here; and those of
        layers that others changed.

        Without a bound on staleness, pieces go both ways at once.
        """
        if self._staleness is not None:
            self.push(pieces, scale)
            yield from self.pull([*self._changed_besides(pieces), *pieces])
            return
        arrivals = [(piece, self._shards.pull(piece)) for piece in self._changed_besides(pieces)]
        for piece, added in self._add_each(pieces, scale):
            arrivals.append((piece, [added, *self._shards.pull(piece)]))
        for piece, futures in arrivals:
            _wait(futures)
            yield piece
        self._raise_versions(pieces)
        self._count_push()
        self._count_pull()

    def add(self, pieces: Sequence[Piece], scale: Callable[[Piece], float]) -> None:
        """As push(), outside of any exchange: no clock moves, and nobody is waited for."""
        _wait([added for _, added in self._add_each(pieces, scale)])
        self._raise_versions(pieces)

    def look(self) -> None:
        """What others have changed until now counts as taken: all weights are read next."""
        if self._versions is not None:
            self._versions.changed()

    def prefetch(self, pieces: Sequence[Piece]) -> None:
        """As pull(), outside of any exchange."""
        for futures in [self._shards.pull(piece) for piece in pieces]:
            _wait(futures)

    def lead(self) -> int:
        """Exchanges that this worker is ahead of the slowest."""
        return max((self._pushed - line.pushed for line in self._roster.active()), default=0)

    @property
    def pushed_bytes(self) -> int:
        versions = 0 if self._versions is None else self._versions.pushed_bytes
        return self._shards.pushed_bytes + versions

    @property
    def pulled_bytes(self) -> int:
        versions = 0 if self._versions is None else self._versions.pulled_bytes
        return self._shards.pulled_bytes + versions

    def _changed_besides(self, pieces: Sequence[Piece]) -> list[Piece]:
        """What others changed since this worker looked last, but for the layers of these pieces."""
        if self._versions is None:
            return []
        layers = self._versions.changed() - {piece.layer for piece in pieces}
        return [piece for piece in self._changing if piece.layer in layers]

    def _raise_versions(self, pieces: Sequence[Piece]) -> None:
        """Of layers that were added to the weights."""
        if self._versions is not None and pieces:
            self._versions.bump({piece.layer for piece in pieces})

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
