"""The packing of a model's tensors, for both parameter servers.

TensorSpec describes a tensor. A span is a part of a tensor. Spans of one dtype are packed into
runs, which are sent as a unit. A run may have spans of several tensors, and a tensor's spans may be
in several runs.

PyTorch is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype, shape, strides and kind of a dense tensor.

    strides: in elements (0 for dimensions of length 1); the boxes have the elements in the order of
        memory
    kind: "parameter", "buffer", or "constant", which workers receive once and do not exchange
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: str

    @staticmethod
    def of(name: str, tensor: torch.Tensor, kind: str) -> TensorSpec:
        strides = tuple(
            step if length > 1 else 0
            for length, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorSpec(name, dtype, tuple(tensor.shape), strides, kind)

    @property
    def count(self) -> int:
        """The number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    def __str__(self) -> str:
        shape, strides = list(self.shape), list(self.strides)
        kind = "frozen or local" if self.kind == "constant" else self.kind
        return f"{kind} {self.name} ({self.dtype} {shape}, strides {strides})"


class Span(NamedTuple):
    """Elements [start, stop) of the tensor with the index `tensor`, in the order of memory."""

    tensor: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def pack_spans(sizes: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[Span, ...]]:
    """Cut tensors into runs of at most `most` elements.

    sizes: index and number of elements of each tensor, all of one dtype
    """
    run: list[Span] = []
    room = most
    for index, size in sizes:
        start = 0
        while start < size:
            stop = min(size, start + room)
            run.append(Span(index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield tuple(run)
                run, room = [], most
    if run:
        yield tuple(run)


def packed_ranges(spans: Iterable[Span]) -> Iterator[tuple[Span, slice]]:
    """Yield spans with their ranges in memory that holds the spans one after another."""
    at = 0
    for span in spans:
        end = at + span.length
        yield span, slice(at, end)
        at = end


def parts_of(
    spans: Iterable[Span], flats: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield the part of a tensor that each span names, and its range as in packed_ranges().

    flats: the tensors, in one dimension, by the spans' indices
    """
    for span, at in packed_ranges(spans):
        yield flats[span.tensor][span.start : span.stop], at
