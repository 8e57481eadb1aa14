"""One worker's exchanges with the boxes: deltas go there, fresh weights come back.

Staleness is bounded as by Ho et al. 2013. With layer dropping, a version counter for each layer
shows which layers other workers have changed. PyTorch is not needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.layout import Shard
from torch_hbmcomm.parameter_server.membership import MembershipTable
from torch_hbmcomm.parameter_server.sharding import (
    MARK_BYTES,
    JobSegments,
    ShardedSegment,
    ShardedValues,
    in_turn,
    wait_all,
)

COUNTER_BYTES = 8  # a layer's version is a signed 64-bit number

# Shards at a time, times the number of boxes. Measured over 1 Gbit/s, see papers/README.md.
SENDS = 2

Scales = Mapping[str, float]  # the factors of deltas, by the kind of the shard


class LayerVersions:
    """A counter for each layer, in a box: the number of additions to the layer's weights.

    A worker adds to the weights first and then raises the version; it reads the versions first and
    then the weights. So a reader that misses a change sees it the next time.

    Raises smb.BoxError, and the errors of JobSegments.alloc().

    Threads: one at a time.
    """

    def __init__(self, segments: JobSegments, layers: int, mode: Literal["auto", "attach"]) -> None:
        self._box = segments.boxes[0]
        self._size = layers * COUNTER_BYTES
        self._counters = segments.alloc(0, self._size, "versions", mode)
        self._increments = segments.alloc(0, self._size)  # bump() has the box add them
        self._seen = [0] * layers
        self.pushed_bytes = 0
        self.pulled_bytes = 0

    def changed(self) -> set[int]:
        """Return the layers whose versions other workers have raised since the last call."""
        found = memoryview(bytearray(self._size))
        self._counters.read(into=found)
        self.pulled_bytes += self._size
        if self._box.transport == "shm":
            # read() was a plain load; a request to the box orders it before loads of the weights.
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
    """A shard, and the operations on it that are in flight: the addition of its delta, the reading
    of its values into the memory of Exchange.fresh(), or both."""

    shard: Shard
    futures: Sequence[smb.Future]

    def wait(self) -> Shard:
        wait_all(self.futures)
        return self.shard


class Exchange:
    """Adds a worker's deltas to shards, and reads fresh values.

    A delta buffer is memory of the box: a worker leaves a delta there, for the box to add. Over shm
    nothing is copied: delta_buffer() and fresh() are the box's own memory.

    Args:
        narrow: True: over transports that copy, values come back in the delta's dtype
        sends: the most shards that are being sent at a time, times the number of boxes; None: any
            number

    Raises smb.BoxError, and the errors of JobSegments.alloc().

    Threads: one at a time.
    """

    def __init__(
        self,
        segments: JobSegments,
        values: ShardedValues,
        *,
        narrow: bool = False,
        sends: int | None = None,
    ) -> None:
        self.values = values
        self.pushed_bytes = self.pulled_bytes = 0
        self._memory = values.memory
        self._delta_buffers = ShardedSegment(
            segments.boxes,
            [
                segments.alloc(box, max(size, MARK_BYTES))
                for box, size in enumerate(values.layout.delta_bytes)
            ],
        )
        self._narrow = narrow
        self._sends = None if sends is None else sends * len(segments.boxes)

    def delta_buffer(self, shard: Shard) -> memoryview:
        """Return the memory of a shard's delta, of delta_size bytes, to fill before add()."""
        return self._delta_buffers.local(shard.box, shard.delta_offset, shard.delta_size)

    def fresh(self, shard: Shard) -> tuple[memoryview, str]:
        """Return the memory of a shard's values, and their dtype.

        The values of fetch(), or of add() with `fetch`, are there after Arrival.wait().
        """
        if self._narrowed(shard):
            begin = shard.delta_offset
            return self._landing[shard.box][begin : begin + shard.delta_size], shard.delta_dtype
        return self._memory.local(shard.box, shard.offset, shard.size), shard.dtype

    def add(self, shards: Iterable[Shard], scales: Scales, fetch: bool) -> list[Arrival]:
        """Start to add the deltas of shards to their values, and with `fetch` to read the values.

        Do not change a delta buffer until its shard has arrived. `sends` bounds the number of
        shards that are being sent. If all were sent together, they would share the connections and
        arrive together, and no values could come back before that.

        shards: yields a shard when its delta buffer is filled
        """
        arrivals = []
        sending: deque[smb.Future] = deque()
        for shard in shards:
            if len(sending) == self._sends:
                sending.popleft().result()
            self.pushed_bytes += shard.delta_size
            sent = self._delta_buffers.send(shard.box, shard.delta_offset, shard.delta_size)
            sending += sent
            added = self._sum(shard, scales[shard.kind])
            fetched = self._ask(shard) if fetch else []
            arrivals.append(Arrival(shard, [*sent, added, *fetched]))
        return arrivals

    def fetch(self, shards: Iterable[Shard]) -> list[Arrival]:
        """Start to read the values of shards into the memory of fresh()."""
        return [Arrival(shard, self._ask(shard)) for shard in shards]

    def fetch_in_turn(self, shards: Iterable[Shard]) -> Iterator[Arrival]:
        """Start to read the values of shards into the memory of fresh(). Yield each shard when it
        has arrived. ShardedValues.read() has the limit of shards in flight."""
        arrivals = (Arrival(shard, self._ask(shard)) for shard in shards)
        return in_turn(((each, each.futures) for each in arrivals), self.values.in_flight)

    def _sum(self, shard: Shard, scale: float) -> smb.Future:
        """Compute values += scale * delta, on the box."""
        return self._memory.segments[shard.box].accumulate_async(
            self._delta_buffers.segments[shard.box],
            shard.dtype,
            scale,
            offset=shard.offset,
            size=shard.size,
            source_offset=shard.delta_offset,
            source_dtype=shard.delta_dtype,
        )

    def _ask(self, shard: Shard) -> list[smb.Future]:
        """Start to read the values of a shard into the memory of fresh(). If they are narrowed, the
        box first rounds them into the delta buffer, and the worker reads them from there."""
        if not self._narrowed(shard):
            self.pulled_bytes += shard.size
            return self._memory.fetch(shard.box, shard.offset, shard.size)
        self.pulled_bytes += shard.delta_size
        begin, size = shard.delta_offset, shard.delta_size
        deltas = self._delta_buffers.segments[shard.box]
        rounded = deltas.assign_async(
            self._memory.segments[shard.box],
            shard.delta_dtype,
            offset=begin,
            size=size,
            source_offset=shard.offset,
            source_dtype=shard.dtype,
        )
        landing = self._landing[shard.box][begin : begin + size]
        return [rounded, deltas.read_async(begin, size, into=landing)]

    @cached_property
    def _landing(self) -> list[memoryview]:
        """The memory where narrowed values arrive, by box."""
        return [memoryview(bytearray(size)) for size in self.values.layout.delta_bytes]

    def _narrowed(self, shard: Shard) -> bool:
        """Return True if values come in the delta's dtype, which helps only if they are copied."""
        wide = shard.delta_dtype != shard.dtype
        return self._narrow and wide and not self._memory.zero_copy[shard.box]


class BoundedExchange:
    """A worker's exchanges, and its clocks: how often it has pushed and pulled.

    An exchange pushes and pulls once each, in either order: start() and end(), or pull() and then
    push(). With staleness 0 a worker pushes only after all workers have pulled, and pulls only
    after all workers have pushed.

    Args:
        changing: the shards that are exchanged
        versions: the layers' version counters; None: no layer is dropped
        staleness: the number of exchanges that a worker may be ahead of the slowest; None: any

    Threads: one at a time.
    """

    def __init__(
        self,
        exchange: Exchange,
        membership: MembershipTable,
        changing: Sequence[Shard],
        versions: LayerVersions | None,
        staleness: int | None,
    ) -> None:
        self._exchange = exchange
        self._membership = membership
        self._changing = changing
        self._versions = versions
        self._staleness = staleness
        self._pushed = self._pulled = 0

    def count_from(self, clock: int) -> None:
        """Set both clocks to `clock`, and wait for the workers that are more than `staleness`
        exchanges behind it."""
        self._pushed = self._pulled = clock
        if self._staleness is not None:
            self._membership.wait_pushed(clock - self._staleness)

    def start(self, sent: Sequence[Shard], scales: Scales) -> Iterable[Arrival]:
        """Add the deltas of these shards to the weights, and fetch fresh weights.

        Fetches the same shards, which then include these deltas, and the layers that other workers
        have changed. After start() call end(), or wait for each arrival and call finish().

        Without a bound on staleness, start() waits for no worker: deltas and fresh weights are in
        flight together. With a bound, start() first waits until its deltas have been added and no
        worker is too far behind; then it begins to fetch.
        """
        if self._staleness is None:
            changed = self._exchange.fetch(self._changed_besides(sent))
            return changed + self._exchange.add(sent, scales, fetch=True)
        self.push(sent, scales)
        return self._exchange.fetch_in_turn([*self._changed_besides(sent), *sent])

    def end(self, sent: Sequence[Shard], arrivals: Iterable[Arrival]) -> list[Shard]:
        """Wait for all arrivals of start(), and finish(). Returns the shards."""
        arrived = [arrival.wait() for arrival in arrivals]
        self.finish(sent)
        return arrived

    def finish(self, sent: Sequence[Shard]) -> None:
        """Advance the clocks. Call it once all shards of an exchange have arrived, in lockstep once
        they have been used."""
        if self._staleness is not None:
            self.count_pull()
            return
        self._raise_versions(sent)
        self._pushed += 1
        self._pulled += 1
        self._membership.set_clocks(self._pushed, self._pulled)

    def push(self, shards: Sequence[Shard], scales: Scales) -> None:
        """Add the deltas to the weights, and wait for the workers that are too far behind."""
        if self._staleness is not None:
            self._membership.wait_pulled(self._pulled - self._staleness)
        self.add(shards, scales)
        self._count_push()

    def count_pull(self) -> None:
        """Count a pull. In lockstep, call it once the fresh weights have been used
        (MembershipTable.set_pulled())."""
        self._pulled += 1
        self._membership.set_pulled(self._pulled)

    def add(self, shards: Sequence[Shard], scales: Scales) -> None:
        """Add the deltas to the weights outside of any exchange: without moving a clock, or waiting
        for other workers."""
        for arrival in self._exchange.add(shards, scales, fetch=False):
            arrival.wait()
        self._raise_versions(shards)

    def prefetch(self, shards: Sequence[Shard]) -> None:
        """Read fresh weights outside of any exchange, and wait for them."""
        for arrival in self._exchange.fetch_in_turn(shards):
            arrival.wait()

    def forget_changes(self) -> None:
        """Mark all changes of other workers as taken. Call it before all weights are read."""
        if self._versions is not None:
            self._versions.changed()

    @property
    def pushed(self) -> int:
        """The worker's clock of pushes."""
        return self._pushed

    @property
    def pushed_bytes(self) -> int:
        versions = 0 if self._versions is None else self._versions.pushed_bytes
        return self._exchange.pushed_bytes + versions

    @property
    def pulled_bytes(self) -> int:
        versions = 0 if self._versions is None else self._versions.pulled_bytes
        return self._exchange.pulled_bytes + versions

    def _changed_besides(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the shards that other workers changed since the last call, except shards whose
        layer is in `shards`."""
        if self._versions is None:
            return []
        layers = self._versions.changed() - {shard.layer for shard in shards}
        return [shard for shard in self._changing if shard.layer in layers]

    def _raise_versions(self, shards: Sequence[Shard]) -> None:
        """Raise the versions of layers that were added to the weights."""
        if self._versions is not None and shards:
            self._versions.bump({shard.layer for shard in shards})

    def _count_push(self) -> None:
        self._pushed += 1
        self._membership.set_pushed(self._pushed)
        if self._staleness is not None:
            self._membership.wait_pushed(self._pushed - self._staleness)
