"""Chooses the layers of a bucket that are sent whole; nothing is sent of the other layers."""

from __future__ import annotations

import torch

from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.encoder import Accumulated, Encoded
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.decision import DropRule


class LayerDropEncoder(DropRule):
    """The rule of layer dropping, fed with averages over the ranks."""

    def __init__(self, config: LayerDrop) -> None:
        super().__init__(config)
        self.squares = config.squares

    def _begin_step(self) -> None:
        super()._begin_step()
        self._overhead = 0

    def encode(self, bucket: Accumulated, averager: Averager) -> Encoded:
        """Choose the layers that the rule sends, without parameters whose gradient is zero on all
        ranks."""
        layers = bucket.layers
        numbers = torch.tensor(
            [bucket.residual_sums, [size == 0 for size in bucket.sizes]], dtype=torch.float64
        )
        sums, zeros = averager.agree(numbers).tolist()
        idle = {name for name, zero in zip(layers.names, zeros, strict=True) if zero == 1}
        decisions = self.decide(layers.layers, layers.sums(sums), idle)
        self._overhead += numbers.nbytes
        whole = sorted(
            index
            for layer, goes in zip(layers.layers, decisions, strict=True)
            for index in layer.members
            if goes and layers.names[index] not in idle
        )
        return Encoded(whole, None, sums, numbers.nbytes)

    def pass_whole(self, layers: BucketLayers) -> None:
        """Do nothing: a step that sends everything needs no layer sums."""

    def end_step(self, overhead: int = 0) -> None:
        super().end_step(overhead + self._overhead)

    def summary(self) -> dict[str, float]:
        return {"threshold": self.threshold}
