"""Tensors cut into buckets: runs of elements of one dtype that travel as one message.

Small tensors share a bucket and a large one spans several, so what is in flight stays bounded.
"Flat" tensors have one dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

_Flat = TypeVar("_Flat", torch.Tensor, torch.Tensor | None)


class Span(NamedTuple):
    """Elements [start, stop) of the flat tensor of that number."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    dtype: torch.dtype
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        return sum(span.stop - span.start for span in self.spans) * self.dtype.itemsize

    def only(self, chosen: Sequence[bool]) -> Bucket:
        """The spans of those tensors that are chosen, by their number."""
        return Bucket(self.dtype, tuple(span for span in self.spans if chosen[span.tensor]))

    def pieces(
        self, wire: torch.Tensor, flats: Sequence[_Flat]
    ) -> Iterator[tuple[torch.Tensor, _Flat]]:
        """The pieces of `wire`, which holds the bucket's elements, with their part of `flats`."""
        at = 0
        for tensor, start, stop in self.spans:
            elements, end = flats[tensor], at + stop - start
            yield wire[at:end], None if elements is None else elements[start:stop]
            at = end

    def pack(self, wire: torch.Tensor, flats: Sequence[torch.Tensor | None]) -> None:
        """None counts as zeros."""
        for piece, source in self.pieces(wire, flats):
            if source is None:
                piece.zero_()
            else:
                piece.copy_(source)

    def unpack(self, wire: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
        for piece, target in self.pieces(wire, flats):
            target.copy_(piece)


Parts = Sequence[tuple[Bucket, torch.Tensor]]  # of one bucket: some of its spans, their elements


def cut(tensors: Iterable[torch.Tensor], most: int) -> Iterator[Bucket]:
    """All elements of `tensors` in buckets of at most `most` bytes, dtype after dtype.

    Tensors of the same sizes and dtypes give the same buckets on every rank.
    """
    by_dtype: dict[torch.dtype, list[tuple[int, int]]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append((index, tensor.numel()))
    for dtype, sizes in by_dtype.items():
        room = capacity = most // dtype.itemsize
        spans: list[Span] = []
        for index, size in sizes:
            start = 0
            while start < size:
                stop = min(size, start + room)
                spans.append(Span(index, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield Bucket(dtype, tuple(spans))
                    spans, room = [], capacity
        if spans:
            yield Bucket(dtype, tuple(spans))
