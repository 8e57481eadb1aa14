"""One worker's exchanges with the boxes: differences go there, fresh weights come back.

Staleness is bounded as by Ho et al. 2013. Where layers are dropped, a counter for each layer tells
which ones others have changed. PyTorch is not needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.layout import Piece
from torch_hbmcomm.parameter_server.roster import Roster
from torch_hbmcomm.parameter_server.sharding import (
    MARK_BYTES,
    JobSegments,
    ShardedSegment,
    Shards,
    wait_all,
)

COUNTER_BYTES = 8  # of a layer's version, a signed 64-bit number

SENDS = 2  # pieces at a time to a box; measured over 1 Gbit/s, see papers/README.md

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
    """A piece whose numbers are on their way to Exchange.fresh()."""

    piece: Piece
    futures: Sequence[smb.Future]

    def wait(self) -> Piece:
        wait_all(self.futures)
        return self.piece


class Exchange:
    """Adds a worker's slots to shards, and reads fresh numbers.

    A slot is memory of the box in which a worker leaves a difference, for the box to add. Over shm
    nothing is copied: slot() and fresh() are the box's own memory.

    Args:
        narrow: over transports that copy, numbers come back in the slot's dtype
        sends: pieces at a time to a box; None: any number

    Raises the errors of JobSegments.alloc(); smb.BoxError.

    Threads: one at a time.
    """

    def __init__(
        self,
        segments: JobSegments,
        shards: Shards,
        *,
        narrow: bool = False,
        sends: int | None = None,
    ) -> None:
        self.shards = shards
        self.pushed_bytes = self.pulled_bytes = 0
        self._memory = shards.memory
        self._slots = ShardedSegment(
            segments.boxes,
            [
                segments.alloc(box, max(size, MARK_BYTES))
                for box, size in enumerate(shards.layout.slot_bytes)
            ],
        )
        self._narrow = narrow
        self._sends = None if sends is None else sends * len(segments.boxes)

    def slot(self, piece: Piece) -> memoryview:
        """Return where the difference of a piece is put before it is sent."""
        return self._slots.local(piece.box, piece.slot_offset, piece.slot_size)

    def fresh(self, piece: Piece) -> tuple[memoryview, str]:
        """Return where the numbers of a piece are after fetch(), and their dtype."""
        if self._narrowed(piece):
            begin = piece.slot_offset
            return self._landing[piece.box][begin : begin + piece.slot_size], piece.slot_dtype
        return self._memory.local(piece.box, piece.offset, piece.size), piece.dtype

    def add(self, pieces: Iterable[Piece], scales: Scales, fetch: bool) -> list[Arrival]:
        """Add the slots of pieces to their numbers, and bring these to fresh() if `fetch`.

        A slot belongs to the box until its piece has arrived. With `sends`, only a few pieces are
        being sent at any time. Pieces that are sent together share the connections and arrive
        together, and until then no numbers could come back.

        pieces: yields a piece when its slot is filled
        """
        arrivals = []
        sending: deque[smb.Future] = deque()
        for piece in pieces:
            if len(sending) == self._sends:
                sending.popleft().result()
            self.pushed_bytes += piece.slot_size
            sent = self._slots.send(piece.box, piece.slot_offset, piece.slot_size)
            sending += sent
            added = self._sum(piece, scales[piece.kind])
            fetched = self._ask(piece) if fetch else []
            arrivals.append(Arrival(piece, [*sent, added, *fetched]))
        return arrivals

    def fetch(self, pieces: Iterable[Piece]) -> list[Arrival]:
        """Bring the numbers of pieces to fresh()."""
        return [Arrival(piece, self._ask(piece)) for piece in pieces]

    def _sum(self, piece: Piece, scale: float) -> smb.Future:
        """Compute numbers += scale * slot, on the box."""
        return self._memory.segments[piece.box].accumulate_async(
            self._slots.segments[piece.box],
            piece.dtype,
            scale,
            offset=piece.offset,
            size=piece.size,
            source_offset=piece.slot_offset,
            source_dtype=piece.slot_dtype,
        )

    def _ask(self, piece: Piece) -> list[smb.Future]:
        """Bring the numbers of a piece to fresh(); the box narrows them by way of the slot."""
        if not self._narrowed(piece):
            self.pulled_bytes += piece.size
            return self._memory.fetch(piece.box, piece.offset, piece.size)
        self.pulled_bytes += piece.slot_size
        begin, size = piece.slot_offset, piece.slot_size
        slot = self._slots.segments[piece.box]
        rounded = slot.assign_async(
            self._memory.segments[piece.box],
            piece.slot_dtype,
            offset=begin,
            size=size,
            source_offset=piece.offset,
            source_dtype=piece.dtype,
        )
        landing = self._landing[piece.box][begin : begin + size]
        return [rounded, slot.read_async(begin, size, into=landing)]

    @cached_property
    def _landing(self) -> list[memoryview]:
        """The memory where narrowed numbers arrive, by box."""
        return [memoryview(bytearray(size)) for size in self.shards.layout.slot_bytes]

    def _narrowed(self, piece: Piece) -> bool:
        """Return True if numbers come in the slot's dtype, which helps only if they are copied."""
        wide = piece.slot_dtype != piece.dtype
        return self._narrow and wide and not self._memory.zero_copy[piece.box]


class BoundedExchange:
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
        exchange: Exchange,
        roster: Roster,
        changing: Sequence[Piece],
        versions: LayerVersions | None,
        staleness: int | None,
    ) -> None:
        self._exchange = exchange
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
            changed = self._exchange.fetch(self._changed_besides(sent))
            return changed + self._exchange.add(sent, scales, fetch=True)
        self.push(sent, scales)
        return self._exchange.fetch([*self._changed_besides(sent), *sent])

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
        for arrival in self._exchange.add(pieces, scales, fetch=False):
            arrival.wait()
        self._raise_versions(pieces)

    def prefetch(self, pieces: Sequence[Piece]) -> None:
        """Read fresh weights outside of any exchange, and wait for them."""
        for arrival in self._exchange.fetch(pieces):
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
        return self._exchange.pushed_bytes + versions

    @property
    def pulled_bytes(self) -> int:
        versions = 0 if self._versions is None else self._versions.pulled_bytes
        return self._exchange.pulled_bytes + versions

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
