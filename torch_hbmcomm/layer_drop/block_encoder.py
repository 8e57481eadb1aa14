"""Sends blocks of a bucket's parameters, and its other parameters whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.encoder import Accumulated, Encoded
from torch_hbmcomm.error_feedback.layers import Layer
from torch_hbmcomm.layer_drop.block_codes import BlockCode, PackedBlockCode
from torch_hbmcomm.layer_drop.blocks import NUMBER, BlockRule, Blocks, size_of
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.optimizer import CatchUp
from torch_hbmcomm.layer_drop.rows import Rows

# The largest finite number that is averaged: the sum over a million ranks is still finite.
_MOST = 1e32


class BlockEncoder(BlockRule):
    """The rule of blocks, fed with the norms of residuals: root mean squares over the ranks.

    Args:
        layers, ranks: as of BlockRule
        parameters: the model's parameters, by name
        catch_up: adapts the optimizers' next step to the blocks that were sent
    """

    squares = False

    def __init__(
        self,
        config: LayerDrop,
        layers: Sequence[Layer],
        ranks: int,
        parameters: Mapping[str, torch.Tensor],
        catch_up: CatchUp,
    ) -> None:
        super().__init__(config, layers, ranks)
        self._parameters = parameters
        self._catch_up = catch_up

    def encode(self, bucket: Accumulated, averager: Averager) -> Encoded:
        """Choose the blocks. A parameter whose gradient is zero on all ranks is not sent. A
        parameter with a residual that is not finite is sent whole."""
        layers = bucket.layers
        packing = self.packing_of(layers.wire.itemsize)
        needs_norms = packing is not None or not self.sends_all
        cut = [i for i, one in enumerate(layers.layers) if needs_norms and not one.always]
        own = [*map(float, (size == 0 for size in bucket.sizes)), *bucket.residual_sums]
        squares = [self._squares(bucket, index) for index in cut]
        numbers = torch.cat([_bounded(torch.tensor(own, dtype=torch.float64)), *squares])
        found = averager.agree(numbers)
        counts = [len(layers.names), len(layers.names), *(len(one) for one in squares)]
        zeros, sums, *means = found.split(counts)
        of_cut = {i: mean.sqrt() for i, mean in zip(cut, means, strict=True)}
        whole, chosen, norms = [], {}, {}
        for index, layer in enumerate(layers.layers):
            if float(zeros[index]) == 1:
                self._wait(layer)
            elif index not in of_cut:
                whole.append(index)
                if not layer.always:
                    self._send(layer, self.send_all(layer))
            else:
                blocks = self.choose(layer, of_cut[index])
                rows = self._send(layer, blocks)
                packs = packing is not None and bool(of_cut[index].isfinite().all())
                if rows.numel == layer.numel and not packs:
                    whole.append(index)
                elif rows.numel:
                    chosen[index], norms[index] = rows, of_cut[index][blocks.indices]
        code: BlockCode | None = None
        if chosen and packing is not None:
            code = PackedBlockCode(bucket, chosen, norms, packing)
        elif chosen:
            code = BlockCode(bucket, chosen)
        return Encoded(whole, code, sums.tolist(), numbers.numel() * NUMBER)

    def _squares(self, bucket: Accumulated, index: int) -> torch.Tensor:
        """Return the square of each block's norm."""
        residual = bucket.residuals.accumulated(bucket.layers.names[index])
        norms = Rows.norms(residual, size_of(residual.numel(), self._config))
        return _bounded(norms.double().square())

    def _send(self, layer: Layer, blocks: Blocks) -> Rows:
        """Tell the optimizers which blocks of a parameter are sent."""
        parameter = self._parameters[layer.name]
        size = size_of(layer.numel, self._config)
        rows = Rows(blocks.indices.to(parameter.device), layer.numel, size)
        self._catch_up.add(parameter, rows, blocks.ages)
        return rows

    def _wait(self, layer: Layer) -> None:
        """Tell the optimizers that nothing of a parameter is sent."""
        if not layer.always:
            none = torch.arange(0)
            self._send(layer, Blocks(none, none.double()))

    def pass_whole(self, layers: BucketLayers) -> None:
        """Note that all blocks were sent."""
        for layer in layers.layers:
            if not layer.always:
                self._send(layer, self.send_all(layer))

    def summary(self) -> dict[str, float]:
        return {}


def _bounded(numbers: torch.Tensor) -> torch.Tensor:
    """Return finite numbers as float32 of at most _MOST, so that their sums are finite. Other
    numbers stay as they are."""
    bounded = torch.where(numbers.isfinite(), numbers.clamp(-_MOST, _MOST), numbers)
    return bounded.to(torch.float32).cpu()
