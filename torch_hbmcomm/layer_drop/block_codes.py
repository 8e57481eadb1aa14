"""Codes of blocks: elements in the bucket's dtype on the wire, or packed whole numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from torch_hbmcomm.error_feedback import passes
from torch_hbmcomm.error_feedback.encoder import Accumulated
from torch_hbmcomm.layer_drop.packing import Packing
from torch_hbmcomm.layer_drop.rows import Rows
from torch_hbmcomm.tensors import power_of_two_above


class BlockCode:
    """The blocks of a bucket that are sent, one parameter after another.

    chosen: the blocks of each parameter, by index in the bucket; none is empty.
    """

    dtype: torch.dtype | None = None

    def __init__(self, bucket: Accumulated, chosen: Mapping[int, Rows]) -> None:
        self._bucket = bucket
        self._chosen = chosen

    @property
    def parameters(self) -> Collection[int]:
        return self._chosen.keys()

    @property
    def numel(self) -> int:
        return self.elements

    @property
    def elements(self) -> int:
        return sum(rows.numel for rows in self._chosen.values())

    def take_out(self, wire: torch.Tensor) -> None:
        """Move the blocks' residuals to the wire. The errors of rounding to the wire's dtype stay
        in the residuals."""
        factor = self._bucket.wire_factor
        for (index, rows), part in zip(self._chosen.items(), self._split(wire), strict=True):
            residual = self._residual(index)
            values = rows.take(residual)
            passes.pack([values], part, factor, 1 / factor)
            kept = part.dtype.itemsize < residual.dtype.itemsize
            rows.put(residual, values if kept else torch.zeros_like(values))

    def restore(self, wire: torch.Tensor, buffer: torch.Tensor, scale: float) -> bool:
        """Put the averages into the bucket, and zeros for all other blocks of these parameters."""
        for (index, rows), part in zip(self._chosen.items(), self._split(wire), strict=True):
            self._put(index, rows, part, buffer)
        return passes.finite(wire)

    def _residual(self, index: int) -> torch.Tensor:
        return self._bucket.residuals.accumulated(self._bucket.layers.names[index])

    def _put(self, index: int, rows: Rows, values: torch.Tensor, buffer: torch.Tensor) -> None:
        begin, end = self._bucket.layers.range_of(index)
        rows.put(buffer[begin:end].zero_(), values.to(buffer.dtype))

    def _split(self, wire: torch.Tensor) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = wire.split([rows.numel for rows in self._chosen.values()])
        return parts


class PackedBlockCode(BlockCode):
    """Blocks as whole numbers of a unit, which is a power of two and the same on all ranks.

    Rounding errors stay in the residuals. So does the part of an element that exceeds the largest
    number.

    norms: for each parameter, and for each of its chosen blocks: the L2 norm of its residual, the
        root of the mean square over the ranks; finite
    """

    dtype: torch.dtype | None = Packing.dtype

    def __init__(
        self,
        bucket: Accumulated,
        chosen: Mapping[int, Rows],
        norms: Mapping[int, torch.Tensor],
        packing: Packing,
    ) -> None:
        super().__init__(bucket, chosen)
        self._packing = packing
        self._units = {index: self._units_of(chosen[index], norms[index]) for index in chosen}

    def _units_of(self, rows: Rows, norms: torch.Tensor) -> torch.Tensor:
        """Return the unit of each block.

        The largest number stands for about 1 + log2(levels + 1) times the root mean square of the
        block's elements. With fewer levels a smaller part of the elements is within their range,
        because otherwise most elements would be zeros.
        """
        levels = self._packing.levels
        usual = norms / rows.counts.to(norms).sqrt()
        widest = usual * (1 + math.log2(levels + 1)) / levels
        return power_of_two_above(widest / math.sqrt(2))

    @property
    def numel(self) -> int:
        return self._packing.numel(self.elements)

    def take_out(self, wire: torch.Tensor) -> None:
        levels, parts = self._packing.levels, []
        for index, rows in self._chosen.items():
            residual, units = self._residual(index), self._spread(index, rows)
            values = rows.take(residual).to(units.dtype)
            numbers = (values / units).round_().clamp_(-levels, levels)
            parts.append(numbers.to(torch.int32))
            rows.put(residual, (values - numbers * units).to(residual.dtype))
        self._packing.pack(torch.cat(parts), wire)

    def restore(self, wire: torch.Tensor, buffer: torch.Tensor, scale: float) -> bool:
        finite = True
        sums = self._packing.sums(wire, self.elements)
        for (index, rows), part in zip(self._chosen.items(), self._split(sums), strict=True):
            means = part.to(torch.float32) * (scale / self._packing.ranks)
            averages = means * self._spread(index, rows)
            finite &= passes.finite(averages)
            self._put(index, rows, averages, buffer)
        return finite

    def _spread(self, index: int, rows: Rows) -> torch.Tensor:
        """Return the unit of each element."""
        return rows.spread(self._units[index].to(self._bucket.layers.device))
