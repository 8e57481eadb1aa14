"""Gradients in flat tensors and in the boxes, and the shards in which a bucket is sent.

Flat tensors have the parameters of one dtype in the reverse of the model's order, which is about
the order in which backward() finishes them. So a bucket's parameters are next to one another.
Each shard in that order goes to the box with the fewest bytes so far, so a large bucket uses all
boxes together. The order depends on the parameters alone, and not on DDP's buckets, which change
after the first iteration.

Counts and ranges are in elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from torch_hbmcomm.parameter_server.layout import Layout, Shard, lay_out
from torch_hbmcomm.parameter_server.packing import TensorSpec, packed_ranges
from torch_hbmcomm.parameter_server.sharding import ShardedValues, wait_all

_SHARD_BYTES = 4 << 20
LONGEST_RUN = 1 << 16  # elements; small enough for a processor's cache


@dataclass(frozen=True)
class Run:
    """Elements that are contiguous in a bucket, in their shard and in flat tensors. They begin at
    `at` in the bucket, at `inside` in the shard, and at `begin` in flat tensors."""

    at: int
    inside: int
    begin: int
    count: int

    def joined(self, other: Run) -> Run | None:
        """Return this run joined with `other`, the next run of its shard; None if they are not
        adjacent in the bucket."""
        if other.at != self.at + self.count:
            return None
        return Run(self.at, self.inside, self.begin, self.count + other.count)

    def cut(self, most: int) -> Iterator[Run]:
        """Yield parts of at most `most` elements."""
        for step in range(0, self.count, most):
            some = min(most, self.count - step)
            yield Run(self.at + step, self.inside + step, self.begin + step, some)


class FlatLayout:
    """The layout of the parameters of one dtype.

    ranges: the range of each parameter in flat tensors, by name
    totals: the layout of the totals in the boxes, with delta buffers for gradients
    weights: the layout of published parameters in the boxes
    """

    def __init__(self, counts: Mapping[str, int], dtype: torch.dtype, boxes: int) -> None:
        """Lay out the parameters.

        counts: each parameter's number of elements, by name, in the model's order
        """
        self._counts = dict(reversed(list(counts.items())))
        ends = list(accumulate(self._counts.values()))
        self.count = ends[-1]
        self._begins = [0, *ends[:-1]]
        self.ranges = {
            name: slice(begin, end)
            for name, begin, end in zip(self._counts, self._begins, ends, strict=True)
        }
        wire = str(wire_dtype(dtype)).removeprefix("torch.")
        self.totals = self._lay_out("float64", wire, boxes)
        self.weights = self._lay_out(wire, wire, boxes)

    def bucket(self, names: Sequence[str]) -> list[tuple[Shard, list[Run]]]:
        """Return the shards that carry a bucket, each with its runs.

        names: the bucket's parameters, in the bucket's order
        """
        numbers = {name: number for number, name in enumerate(self._counts)}
        starts = {}  # each tensor's start in the bucket, by the tensor's number
        at = 0
        for name in names:
            starts[numbers[name]] = at
            at += self._counts[name]
        return [
            (part, self._runs(part, starts))
            for shard in self.totals.shards
            for part in shard.within(starts)
        ]

    def read(self, values: ShardedValues) -> torch.Tensor:
        """Read all values into a flat tensor. Waits."""
        found = torch.empty(self.count, dtype=getattr(torch, values.layout.tensors[0].dtype))
        wait_all(
            values.start_read(shard, found[self._flat_range(shard)])
            for shard in values.layout.shards
        )
        return found

    def write(self, values: ShardedValues, numbers: torch.Tensor) -> None:
        """Replace all values by the elements of a flat tensor. Waits."""
        wait_all(
            values.start_write(shard, numbers[self._flat_range(shard)])
            for shard in values.layout.shards
        )

    def _lay_out(self, dtype: str, wire: str, boxes: int) -> Layout:
        tensors = [
            TensorSpec(name, dtype, (count,), (1,), "parameter")
            for name, count in self._counts.items()
        ]
        return lay_out(tensors, boxes, wire, shard_bytes=_SHARD_BYTES)

    def _flat_range(self, shard: Shard) -> slice:
        """Return a whole shard's range in flat tensors. The shard's spans are contiguous there."""
        first = shard.spans[0]
        begin = self._begins[first.tensor] + first.start
        return slice(begin, begin + shard.count)

    def _runs(self, shard: Shard, starts: Mapping[int, int]) -> list[Run]:
        together: list[Run] = []
        for span, inside in packed_ranges(shard.spans):
            run = Run(
                starts[span.tensor] + span.start,
                inside.start,
                self._begins[span.tensor] + span.start,
                span.length,
            )
            joined = together[-1].joined(run) if together else None
            together[-1:] = [*together[-1:], run] if joined is None else [joined]
        return [part for run in together for part in run.cut(LONGEST_RUN)]


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype on the wire: float64 for float64, float32 for every other dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
