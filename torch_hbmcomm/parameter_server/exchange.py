"""One worker's exchanges with the boxes: differences go there, fresh weights come back.

Staleness is bounded as by Ho et al. 2013. Where layers are dropped, a counter for each layer tells
which ones others have changed. PyTorch is not needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.layout import Piece
from torch_hbmcomm.parameter_server.roster import Roster
from torch_hbmcomm.parameter_server.sharding import JobSegments, ShardedWeights, wait_all

COUNTER_BYTES = 8  # of a layer's version, a signed 64-bit number

_SENDS = 2  # pieces at a time to a box; measured over 1 Gbit/s, see papers/README.md

Scales = Mapping[str, float]  # what the box multiplies differences with, by the kind of the piece


class LayerVersions:
    """A counter for each layer, in a box: how often its weights were added to.

    A worker adds to the weights first and raises the version then; it looks at the versions first
    and reads weights then. So a change that is missed is seen the next time, and none is missed for
    good.

    Raises what JobSegments.alloc() does; smb.BoxError.

    Threads: one at a time.
    """

    def __init__(self, segments: JobSegments, layers: int, mode: Literal["auto", "attach"]) -> None:
        self._box = segments.boxes[0]
        self._size = layers * COUNTER_BYTES
        self._counters = segments.alloc(0, self._size, "versions", mode)
        self._increments = segments.alloc(0, self._size)  # what this worker adds
        self._seen = [0] * layers
        self.pushed_bytes = 0
        self.pulled_bytes = 0

    def changed(self) -> set[int]:
        """Return the layers that others have raised since the last call."""
        found = memoryview(bytearray(self._size))
        self._counters.read(into=found)
        self.pulled_bytes += self._size
        if self._box.transport == "shm":  # a plain load: a question orders it before what follows
            self._counters.fetch_add(0, 0)
        seen, self._seen = self._seen, found.cast("q").tolist()
        return {
            layer
            for layer, (before, now) in enumerate(zip(seen, self._seen, strict=True))
            if now != before
        }

    def bump(self, layers: Collection[int]) -> None:
        """Raise the versions of layers whose change is in the weights. Waits."""
        increments = memoryview(bytearray(self._size)).cast("q")
        for layer in layers:
            increments[layer] = 1
        with self._box.batch() as batch:
            batch.write(self._increments, source=increments.cast("B"))
            batch.accumulate(self._counters, self._increments, "int64")
        self.pushed_bytes += self._size
        for layer in layers:
            self._seen[layer] += 1


class Arrival(NamedTuple):
    """A piece whose weights are under way to ShardedWeights.fresh()."""

    piece: Piece
    futures: Sequence[smb.Future]

    def wait(self) -> Piece:
        wait_all(self.futures)
        return self.piece


class WeightExchange:
    """A worker's exchanges, and its clocks: how often it has pushed and pulled.

    An exchange pushes and pulls once each, in either order: start() and end(), or pull() and then
    push(). With staleness 0 nobody pushes before all have pulled, nor pulls before all have pushed.

    Args:
        changing: the pieces that are exchanged
        versions: of layers, where some are dropped
        staleness: how many exchanges a worker may be ahead of the slowest one; None: any number

    Threads: one at a time.
    """

    def __init__(
        self,
        weights: ShardedWeights,
        roster: Roster,
        changing: Sequence[Piece],
        versions: LayerVersions | None,
        staleness: int | None,
    ) -> None:
        self._weights = weights
        self._roster = roster
        self._changing = changing
        self._versions = versions
        self._staleness = staleness
        self._pushed = self._pulled = 0

    def count_from(self, clock: int) -> None:
        """Set the clocks to the foremost worker's, and wait for those too far behind it."""
        self._pushed = self._pulled = clock
        if self._staleness is not None:
            self._roster.wait_pushed(clock - self._staleness)

    def start(self, sent: Sequence[Piece], scales: Scales) -> list[Arrival]:
        """Add the slots of these pieces to the weights, and ask for fresh weights.

        Those come of the pieces that were sent, with the difference in them, and of layers that
        others have changed. Call end() then; or wait for each of them, and call finish().

        Without a bound on staleness, pieces go both ways at once. With one, it returns when all
        differences have been added and the workers are near enough to each other.
        """
        if self._staleness is None:
            changed = self._fetch(self._changed_besides(sent))
            return changed + self._add(sent, scales, fetch=True)
        self.push(sent, scales)
        return self._fetch([*self._changed_besides(sent), *sent])

    def end(self, sent: Sequence[Piece], arrivals: Sequence[Arrival]) -> list[Piece]:
        """Wait for all that start() asked for, and finish(). Returns the pieces."""
        arrived = [arrival.wait() for arrival in arrivals]
        self.finish(sent)
        return arrived

    def finish(self, sent: Sequence[Piece]) -> None:
        """Tell the others about an exchange whose pieces have all arrived: clocks advance."""
        if self._staleness is None:
            self._raise_versions(sent)
            self._count_push()
        self._count_pull()

    def push(self, pieces: Sequence[Piece], scales: Scales) -> None:
        """Add the slots to the weights, and wait for the workers that are too far behind."""
        if self._staleness is not None:
            self._roster.wait_pulled(self._pulled - self._staleness)
        self.add(pieces, scales)
        self._count_push()

    def pull(self, pieces: Sequence[Piece]) -> None:
        """Read fresh weights, and wait for them."""
        self.prefetch(pieces)
        self._count_pull()

    def add(self, pieces: Sequence[Piece], scales: Scales) -> None:
        """Add the slots to the weights outside of any exchange: no clock moves, and nobody is
        waited for."""
        for arrival in self._add(pieces, scales, fetch=False):
            arrival.wait()
        self._raise_versions(pieces)

    def prefetch(self, pieces: Sequence[Piece]) -> None:
        """Read fresh weights outside of any exchange, and wait for them."""
        for arrival in self._fetch(pieces):
            arrival.wait()

    def forget_changes(self) -> None:
        """Count what others have changed until now as taken: all weights are read next."""
        if self._versions is not None:
            self._versions.changed()

    def lead(self) -> int:
        """Return the exchanges that this worker is ahead of the slowest."""
        return max((self._pushed - line.pushed for line in self._roster.active()), default=0)

    @property
    def pushed_bytes(self) -> int:
        versions = 0 if self._versions is None else self._versions.pushed_bytes
        return self._weights.pushed_bytes + versions

    @property
    def pulled_bytes(self) -> int:
        versions = 0 if self._versions is None else self._versions.pulled_bytes
        return self._weights.pulled_bytes + versions

    def _fetch(self, pieces: Sequence[Piece]) -> list[Arrival]:
        return [Arrival(piece, self._weights.fetch(piece)) for piece in pieces]

    def _add(self, pieces: Sequence[Piece], scales: Scales, fetch: bool) -> list[Arrival]:
        """Send and add pieces, and ask for their weights behind that if `fetch`.

        A few pieces are sent at a time: those that are under way together share the connections and
        arrive together, and nothing could come back meanwhile.
        """
        arrivals = []
        sending: deque[smb.Future] = deque()
        for piece in pieces:
            if len(sending) == _SENDS * self._weights.boxes:
                sending.popleft().result()
            sending += self._weights.send(piece)
            added = self._weights.add(piece, scales[piece.kind])
            fetched = self._weights.fetch(piece) if fetch else []
            arrivals.append(Arrival(piece, [added, *fetched]))
        wait_all(sending)
        return arrivals

    def _changed_besides(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return what others changed since this worker looked last, but for these layers."""
        if self._versions is None:
            return []
        layers = self._versions.changed() - {piece.layer for piece in pieces}
        return [piece for piece in self._changing if piece.layer in layers]

    def _raise_versions(self, pieces: Sequence[Piece]) -> None:
        """Raise the versions of layers that were added to the weights."""
        if self._versions is not None and pieces:
            self._versions.bump({piece.layer for piece in pieces})

    def _count_push(self) -> None:
        self._pushed += 1
        self._roster.set_pushed(self._pushed)
        if self._staleness is not None:
            self._roster.wait_pushed(self._pushed - self._staleness)

    def _count_pull(self) -> None:
        self._pulled += 1
        self._roster.set_pulled(self._pulled)
