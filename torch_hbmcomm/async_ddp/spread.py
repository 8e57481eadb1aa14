"""Numbers of a space in the boxes, one segment in each."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch

from torch_hbmcomm import smb
from torch_hbmcomm.async_ddp.job import Job
from torch_hbmcomm.async_ddp.places import Piece, Space


class Spread:
    """One number of `dtype` for each element of the space; zeros at first.

    With a `key` they are all ranks', without one this rank's alone. By the transport shm, local()
    is the box's own memory; by the others it is a copy, which the futures of read() and write()
    move.
    """

    def __init__(self, job: Job, space: Space, dtype: torch.dtype, key: str | None = None) -> None:
        self._space = space
        self._dtype = dtype
        self._in_place = [box.transport == "shm" for box in job.boxes]
        self.segments = [
            job.alloc(index, space.room * dtype.itemsize, key and f"{key}/{index}")
            for index in range(len(job.boxes))
        ]

    def local(self, piece: Piece) -> torch.Tensor:
        return self._memory[piece.box][piece.at : piece.at + piece.count]

    def read(self, piece: Piece) -> list[smb.Future]:
        """Box -> local()."""
        if self._in_place[piece.box]:
            return []
        return [self.segments[piece.box].read_async(*self.bytes_of(piece))]

    def write(self, piece: Piece) -> list[smb.Future]:
        """local() -> box."""
        if self._in_place[piece.box]:
            return []
        return [self.segments[piece.box].write_async(*self.bytes_of(piece))]

    def read_all(self) -> torch.Tensor:
        """All numbers, in the order of the space. Waits."""
        found = torch.empty(self._space.count, dtype=self._dtype)
        wait(
            self.segments[piece.box].read_async(
                *self.bytes_of(piece), into=found[piece.begin : piece.begin + piece.count]
            )
            for piece in self._space.whole()
        )
        return found

    def write_all(self, numbers: torch.Tensor) -> None:
        """As read_all()."""
        wait(
            self.segments[piece.box].write_async(
                *self.bytes_of(piece), source=numbers[piece.begin : piece.begin + piece.count]
            )
            for piece in self._space.whole()
        )

    def bytes_of(self, piece: Piece) -> tuple[int, int]:
        """Offset and size in the box."""
        return piece.at * self._dtype.itemsize, piece.count * self._dtype.itemsize

    @cached_property
    def _memory(self) -> list[torch.Tensor]:
        return [
            torch.frombuffer(segment.view() if in_place else segment.buffer, dtype=self._dtype)
            for segment, in_place in zip(self.segments, self._in_place, strict=True)
        ]


def wait(futures: Iterable[smb.Future]) -> None:
    """For all of them, which were issued before the first is waited for."""
    for future in list(futures):
        future.result()


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """As what numbers of that dtype travel."""
    return torch.float64 if dtype == torch.float64 else torch.float32
