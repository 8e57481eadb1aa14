"""Memory that is spread over a job's boxes, a segment in each.

`ParameterServer` keeps weights in ShardedValues; `async_hook` keeps the totals of gradients there,
and versions of the parameters. PyTorch is not needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import islice
from typing import Any, Literal, TypeVar

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.layout import Layout, Shard

MARK_BYTES = 64  # behind the values of a box: the mark, equal in all boxes of a job
IN_FLIGHT = 8  # shards at a time, times the number of boxes; Exchange.add() has another limit

_LONGEST_WAIT = 300.0  # seconds for an operation of a box that is given by its address

Boxes = smb.Box | str | Sequence[smb.Box | str]
Item = TypeVar("Item")


def connect_boxes(boxes: Boxes, resources: ExitStack) -> list[smb.Box]:
    """Connect to the boxes given by address. `resources` closes these connections.

    Operations on these connections raise smb.OperationTimeout after 300 s, for example if the box
    is stopped.

    Raises TypeError for `boxes` of a wrong type, ValueError for an empty sequence, and the errors
    of smb.connect().
    """
    if not isinstance(boxes, smb.Box | str | Sequence):
        raise TypeError(f"box is an address, a Box, or several of them, not {boxes!r}")
    found = []
    for one in [boxes] if isinstance(boxes, smb.Box | str) else boxes:
        if isinstance(one, str):
            one = resources.enter_context(smb.connect(one, timeout=_LONGEST_WAIT))
        found.append(one)
    if not found:
        raise ValueError("box names no box")
    return found


class JobSegments:
    """The segments that a worker has attached in the boxes of a job.

    Args:
        name: the job's name, with which the segments' keys begin
        shared, own: the bytes that each box has to hold once (shared) and for each worker (own), in
            the order of `boxes`; only for the text of a MemoryError
        temporary: True: the boxes delete the job's segments when the last worker leaves

    Threads: one at a time.
    """

    def __init__(
        self,
        boxes: Sequence[smb.Box],
        name: str,
        shared: Sequence[int],
        own: Sequence[int],
        temporary: bool = True,
    ) -> None:
        self.boxes = boxes
        self._name = name
        self._needs = list(zip(shared, own, strict=True))
        self._temporary = temporary
        self._attached = ExitStack()

    def alloc(
        self,
        box: int,
        size: int | None,
        key: str | None = None,
        mode: Literal["auto", "attach"] = "auto",
    ) -> smb.Segment:
        """Attach to the job's segment of that key in a box. Without a key, make a segment for this
        worker alone. Box.alloc() explains size and mode.

        Raises MemoryError, which says how much the box has to hold; smb.NoSuchKey; smb.BoxError.
        """
        full_key = None if key is None else f"{self._name}/{key}"
        with self.naming_needs(box):
            segment = self.boxes[box].alloc(
                size, full_key, mode, temporary=self._temporary or key is None
            )
        self._attached.callback(segment.free)
        return segment

    @contextmanager
    def naming_needs(self, box: int) -> Iterator[None]:
        """If the block raises MemoryError, add to its text how much the box has to hold."""
        try:
            yield
        except MemoryError as error:
            shared, own = self._needs[box]
            raise MemoryError(
                f"the box {self.boxes[box].url} is too small: it has to hold {shared} bytes, once, "
                f"{own} bytes for each worker, and 1 MiB besides ({error})"
            ) from error

    def free(self) -> None:
        """Free the attachments. Does nothing if a box is closed, as when its group has ended,
        because the attachments have ended with the connection."""
        if not self.ended:
            self._attached.close()

    @property
    def ended(self) -> bool:
        """Return True if a box's connection is closed."""
        return any(box.closed for box in self.boxes)


class ShardedSegment:
    """A segment in each box, whose bytes are named by the index of the box, offset and size.

    Over shm it is zero-copy: local() is the box's own memory, which any client may change at any
    time, and fetch() and send() do nothing. Over other transports local() is this process's copy:
    fetch() reads it from the box, and send() writes it to the box.

    Threads: one at a time.
    """

    def __init__(self, boxes: Sequence[smb.Box], segments: Sequence[smb.Segment]) -> None:
        self.segments = segments
        self.zero_copy = [box.transport == "shm" for box in boxes]

    @cached_property
    def memory(self) -> list[memoryview]:
        """The memory of each box's segment, by box; local() returns parts of it."""
        return [
            segment.view() if zero_copy else segment.buffer
            for segment, zero_copy in zip(self.segments, self.zero_copy, strict=True)
        ]

    def local(self, box: int, offset: int, size: int) -> memoryview:
        return self.memory[box][offset : offset + size]

    def fetch(self, box: int, offset: int, size: int) -> list[smb.Future]:
        """Copy box -> local()."""
        if self.zero_copy[box]:
            return []
        return [self.segments[box].read_async(offset, size)]

    def send(self, box: int, offset: int, size: int) -> list[smb.Future]:
        """Copy local() -> box."""
        if self.zero_copy[box]:
            return []
        return [self.segments[box].write_async(offset, size)]


class ShardedValues:
    """Values that a job's boxes hold for all its workers, cut as a layout says; zeros at first.

    Args:
        key: the segment in each box has the key "<key>/<index of the box>", within the job

    Raises smb.BoxError, and the errors of JobSegments.alloc().

    Threads: one at a time.
    """

    def __init__(
        self,
        segments: JobSegments,
        layout: Layout,
        key: str,
        mode: Literal["auto", "attach"] = "auto",
    ) -> None:
        self.layout = layout
        self.in_flight = IN_FLIGHT * len(segments.boxes)
        self.memory = ShardedSegment(
            segments.boxes,
            [
                segments.alloc(box, size + MARK_BYTES, f"{key}/{box}", mode)
                for box, size in enumerate(layout.weights_bytes)
            ],
        )

    def read(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, memoryview]]:
        """Yield each shard with its values as the box has them, without rounding. Waits.

        At most IN_FLIGHT times the number of boxes are in flight in all, whichever boxes they are
        in. The read of the next one begins when the earliest of them has arrived. So the
        connection's time limit is for each shard, not for all.
        """

        def start(shard: Shard) -> tuple[tuple[Shard, memoryview], list[smb.Future]]:
            if self.memory.zero_copy[shard.box]:
                return (shard, self.memory.local(shard.box, shard.offset, shard.size)), []
            found = memoryview(bytearray(shard.size))
            return (shard, found), [self.start_read(shard, found)]

        return in_turn(map(start, shards), self.in_flight)

    def write(self, values: Iterable[tuple[Shard, memoryview]]) -> None:
        """Set the values of shards, within read()'s limit of shards in flight. Call it only while
        no worker adds to them. Waits."""
        started = ((None, [self.start_write(shard, source)]) for shard, source in values)
        for _ in in_turn(started, self.in_flight):
            pass

    def start_read(self, shard: Shard, into: Any) -> smb.Future:
        """Start to read the values of a shard into memory with Python's buffer protocol, or a
        tensor."""
        return self.memory.segments[shard.box].read_async(shard.offset, shard.size, into=into)

    def start_write(self, shard: Shard, source: Any) -> smb.Future:
        """Start a write(). source: like start_read()'s `into`"""
        return self.memory.segments[shard.box].write_async(shard.offset, shard.size, source=source)

    def mark(self, mark: int) -> None:
        """Write a job's mark behind the values of every box. Waits."""
        for segment, size in zip(self.memory.segments, self.layout.weights_bytes, strict=True):
            segment.write(size, 8, source=mark.to_bytes(8, "little"))

    def check_mark(self, mark: int) -> None:
        """Raise RuntimeError if a segment has another mark, as when all other workers left while
        this one joined."""
        segments = self.memory.segments
        marks = [bytearray(8) for _ in segments]
        wait_all(
            segment.read_async(size, 8, into=found)
            for segment, size, found in zip(segments, self.layout.weights_bytes, marks, strict=True)
        )
        for segment, found in zip(segments, marks, strict=True):
            if int.from_bytes(found, "little") != mark:
                raise RuntimeError(
                    f"{segment!r} has no weights of this job: its other workers have "
                    "just left, or one of several boxes lost its data; start the worker again"
                )


def in_turn(started: Iterable[tuple[Item, Sequence[smb.Future]]], most: int) -> Iterator[Item]:
    """Start the first `most` items, and return an iterator. It waits for the operations of an item,
    starts the next item, and yields the former one. So at most `most` items are in flight.

    started: starts the operations of an item when it is asked for the item
    """
    rest = iter(started)
    unfinished = deque(islice(rest, most))

    def finished() -> Iterator[Item]:
        while unfinished:
            item, futures = unfinished.popleft()
            wait_all(futures)
            unfinished.extend(islice(rest, 1))
            yield item

    return finished()


def wait_all(futures: Iterable[smb.Future]) -> None:
    """Issue all operations that `futures` yields, then wait for each."""
    for future in list(futures):
        future.result()
