"""The weights of a job in its boxes, and this worker's slots.

A slot is memory of the box in which a worker leaves its difference, for the box to add to the
weights. By the transport shm both are the box's own memory (``Segment.view``): a difference is
computed where the box reads it, and weights are read where they lie. By the others they are this
process's copies, which send() and pull() move.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.layout import Layout, Piece

_MARK_BYTES = 64  # behind the weights: a number that all shards of one job bear


class _Shard(NamedTuple):
    """One box's part. weights, slot: as this process sees them. landing: where weights that travel
    in a narrower type arrive."""

    weights_segment: smb.Segment
    slot_segment: smb.Segment
    weights: memoryview
    slot: memoryview
    landing: memoryview
    in_place: bool


class Shards:
    """Raises MemoryError when a box is too small, saying how much is needed; smb.BoxError."""

    def __init__(
        self,
        boxes: Sequence[smb.Box],
        name: str,
        layout: Layout,
        mode: Literal["auto", "attach"],
        temporary: bool,
    ) -> None:
        self._layout = layout
        self._shards = []
        for index, box in enumerate(boxes):
            weights, slot = layout.weights_bytes[index], layout.slot_bytes[index]
            try:
                shard = _shard(box, f"{name}/weights/{index}", weights, slot, mode, temporary)
            except MemoryError as error:
                raise too_small(box, layout, index) from error
            self._shards.append(shard)
        self.pushed_bytes = 0
        self.pulled_bytes = 0

    @property
    def boxes(self) -> int:
        return len(self._shards)

    def slot(self, piece: Piece) -> memoryview:
        """Where the difference of a piece is put before it is pushed."""
        begin = piece.slot_offset
        return self._shards[piece.box].slot[begin : begin + piece.slot_size]

    def fresh(self, piece: Piece) -> tuple[memoryview, str]:
        """Where the weights of a piece are after pull(), and their dtype. In place they may change
        at any time."""
        shard = self._shards[piece.box]
        if _narrowed(shard, piece):
            begin = piece.slot_offset
            return shard.landing[begin : begin + piece.slot_size], piece.slot_dtype
        return self._weights(piece), piece.dtype

    def read(self, piece: Piece) -> memoryview:
        """The weights of a piece as the box has them, without rounding. Waits."""
        shard = self._shards[piece.box]
        if shard.in_place:
            return self._weights(piece)
        found = memoryview(bytearray(piece.size))
        shard.weights_segment.read(piece.offset, piece.size, into=found)
        return found

    def write(self, piece: Piece, values: memoryview) -> None:
        """Sets the weights of a piece; only while nobody adds to them. Waits."""
        self._shards[piece.box].weights_segment.write(piece.offset, piece.size, source=values)

    def send(self, piece: Piece) -> smb.Future | None:
        """The piece's part of the slot -> box; in place there is nothing to do. Until the future
        that add() gives is done the slot is the box's own."""
        shard = self._shards[piece.box]
        self.pushed_bytes += piece.slot_size
        if shard.in_place:
            return None
        return shard.slot_segment.write_async(piece.slot_offset, piece.slot_size)

    def add(self, piece: Piece, scale: float) -> smb.Future:
        """weights += scale * slot, on the box."""
        shard = self._shards[piece.box]
        return shard.weights_segment.accumulate_async(
            shard.slot_segment,
            piece.dtype,
            scale,
            offset=piece.offset,
            size=piece.size,
            source_offset=piece.slot_offset,
            source_dtype=piece.slot_dtype,
        )

    def pull(self, piece: Piece) -> list[smb.Future]:
        """Box -> fresh(); in place there is nothing to do."""
        shard = self._shards[piece.box]
        if not _narrowed(shard, piece):
            self.pulled_bytes += piece.size
            if shard.in_place:
                return []
            return [shard.weights_segment.read_async(piece.offset, piece.size)]
        self.pulled_bytes += piece.slot_size
        begin, size = piece.slot_offset, piece.slot_size
        rounded = shard.slot_segment.assign_async(
            shard.weights_segment,
            piece.slot_dtype,
            offset=begin,
            size=size,
            source_offset=piece.offset,
            source_dtype=piece.dtype,
        )
        landing = shard.landing[begin : begin + size]
        return [rounded, shard.slot_segment.read_async(begin, size, into=landing)]

    def mark(self, mark: int) -> None:
        for shard, size in zip(self._shards, self._layout.weights_bytes, strict=True):
            shard.weights_segment.write(size, 8, source=mark.to_bytes(8, "little"))

    def check_mark(self, mark: int) -> None:
        """Raises RuntimeError when the segments are not those that bear the mark: when all others
        left while this worker came."""
        for shard, size in zip(self._shards, self._layout.weights_bytes, strict=True):
            found = bytearray(8)
            shard.weights_segment.read(size, 8, into=found)
            if int.from_bytes(found, "little") != mark:
                raise RuntimeError(
                    f"{shard.weights_segment!r} has no weights of this job: its other workers have "
                    "just left, or one of several boxes lost its data; start the worker again"
                )

    def close(self) -> None:
        for shard in self._shards:
            shard.slot_segment.delete()
            shard.weights_segment.free()

    def _weights(self, piece: Piece) -> memoryview:
        return self._shards[piece.box].weights[piece.offset : piece.offset + piece.size]


def too_small(box: smb.Box, layout: Layout, index: int) -> MemoryError:
    """The error of a box, the one of that index, that has no room for a job."""
    return MemoryError(
        f"the box {box.url} is too small: it has to hold {layout.weights_bytes[index]} bytes of "
        f"weights, once, {layout.slot_bytes[index]} bytes for each worker, and 1 MiB besides"
    )


def _narrowed(shard: _Shard, piece: Piece) -> bool:
    """Whether weights come as the slot's dtype: it saves a copy only where they travel."""
    return not shard.in_place and piece.slot_dtype != piece.dtype


def _shard(
    box: smb.Box,
    key: str,
    weights: int,
    slot: int,
    mode: Literal["auto", "attach"],
    temporary: bool,
) -> _Shard:
    weights_segment = box.alloc(weights + _MARK_BYTES, key, mode, temporary)
    slot_segment = box.alloc(max(slot, _MARK_BYTES), temporary=True)
    in_place = box.transport == "shm"
    return _Shard(
        weights_segment,
        slot_segment,
        weights_segment.view() if in_place else weights_segment.buffer,
        slot_segment.view() if in_place else slot_segment.buffer,
        memoryview(bytearray(0 if in_place else slot)),
        in_place,
    )
