"""Places of gradients in the boxes, the pieces in which a bucket travels, and the memory for them.

The parameters of one dtype follow one another in the reverse of the model's order: about the order
in which backward() finishes them, so that what shares a bucket lies together. Blocks of that order
are dealt to the boxes in turn, so that a large bucket uses all boxes at once. All this depends on
the parameters alone, not on DDP's buckets, which change after the first iteration.
(`parameter_server/sharding.py` compares this with how weights are packed.)

Offsets and counts are elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.sharding import JobSegments, ShardedSegment, wait_all

_BLOCK = 1 << 19
LONGEST_RUN = 1 << 16  # few enough to be worked on within a processor's cache


@dataclass(frozen=True)
class Run:
    """Elements that are neighbours in a bucket as well as in the layout.

    at: in the bucket. begin: in the layout.
    """

    at: int
    begin: int
    count: int


@dataclass(frozen=True)
class BucketPiece:
    """Elements of a bucket that are neighbours in one box, and so in the layout.

    at: in the box. begin: in the layout.
    """

    box: int
    at: int
    begin: int
    count: int
    runs: tuple[Run, ...]


class BlockCyclicLayout:
    """The order of the elements of one dtype, and which boxes they lie in.

    counts: of each parameter's elements, by name, in the model's order
    """

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
        """The number of elements that each box has memory for; at least one."""
        blocks = -(-self.count // self._block)
        return max(1, -(-blocks // self._boxes)) * self._block

    def whole(self) -> list[BucketPiece]:
        """Return the pieces of all elements, taken as one bucket in the order of the layout."""
        return self._pieces([Run(0, 0, self.count)])

    def bucket(self, names: Sequence[str]) -> list[BucketPiece]:
        """Return the pieces of a bucket that has these parameters in this order."""
        runs = []
        at = 0
        for name in names:
            place = self.ranges[name]
            runs.append(Run(at, place.start, place.stop - place.start))
            at += place.stop - place.start
        return self._pieces(sorted(runs, key=lambda run: run.begin))

    def _pieces(self, runs: Sequence[Run]) -> list[BucketPiece]:
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

    def _piece(self, parts: Sequence[Run]) -> BucketPiece:
        begin = parts[0].begin
        block, inside = divmod(begin, self._block)
        turn, box = divmod(block, self._boxes)
        runs = tuple(
            Run(part.at + step, part.begin + step, min(LONGEST_RUN, part.count - step))
            for part in parts
            for step in range(0, part.count, LONGEST_RUN)
        )
        count = sum(run.count for run in runs)
        return BucketPiece(box, turn * self._block + inside, begin, count, runs)


class ShardedTensor:
    """A number of `dtype` for each element of a layout, in the boxes; zeros at first.

    With a `key` they are all ranks', without one this rank's alone. Over shm, local() is the box's
    own memory (zero-copy); over other transports it is a copy, which fetch() and send() move.
    """

    def __init__(
        self,
        segments: JobSegments,
        layout: BlockCyclicLayout,
        dtype: torch.dtype,
        key: str | None = None,
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        size = layout.room * dtype.itemsize
        self._memory = ShardedSegment(
            segments.boxes,
            [
                segments.alloc(box, size, key and f"{key}/{box}")
                for box in range(len(segments.boxes))
            ],
        )

    def local(self, piece: BucketPiece) -> torch.Tensor:
        return self._tensors[piece.box][piece.at : piece.at + piece.count]

    def fetch(self, piece: BucketPiece) -> list[smb.Future]:
        """Copy box -> local()."""
        return self._memory.fetch(piece.box, *self._bytes_of(piece))

    def send(self, piece: BucketPiece) -> list[smb.Future]:
        """Copy local() -> box."""
        return self._memory.send(piece.box, *self._bytes_of(piece))

    def add(self, piece: BucketPiece, source: ShardedTensor) -> smb.Future:
        """Compute self += source, on the box."""
        offset, size = self._bytes_of(piece)
        source_offset, _ = source._bytes_of(piece)
        return self._memory.segments[piece.box].accumulate_async(
            source._memory.segments[piece.box],
            self._dtype,
            offset=offset,
            size=size,
            source_offset=source_offset,
            source_dtype=source._dtype,
        )

    def read_all(self) -> torch.Tensor:
        """Read all numbers, in the order of the layout. Waits."""
        found = torch.empty(self._layout.count, dtype=self._dtype)
        wait_all(
            self._memory.segments[piece.box].read_async(
                *self._bytes_of(piece), into=found[piece.begin : piece.begin + piece.count]
            )
            for piece in self._layout.whole()
        )
        return found

    def write_all(self, numbers: torch.Tensor) -> None:
        """Write all numbers, in the order of the layout. Waits."""
        wait_all(
            self._memory.segments[piece.box].write_async(
                *self._bytes_of(piece), source=numbers[piece.begin : piece.begin + piece.count]
            )
            for piece in self._layout.whole()
        )

    def _bytes_of(self, piece: BucketPiece) -> tuple[int, int]:
        """Return offset and size in the box."""
        return piece.at * self._dtype.itemsize, piece.count * self._dtype.itemsize

    @cached_property
    def _tensors(self) -> list[torch.Tensor]:
        return [torch.frombuffer(memory, dtype=self._dtype) for memory in self._memory.memory]


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what numbers of that dtype travel as."""
    return torch.float64 if dtype == torch.float64 else torch.float32
