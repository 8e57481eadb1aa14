"""The choice of the deltas that a worker sends: everything, or layers by the rule of layer
dropping.

Layer-wise dropping follows Lee et al. 2020. A worker's delta is its model minus the weights that
the worker took last: the sum of the unsent updates. This sum is the error-feedback residual, which
the paper calls the cache (equation 1). So the unsent updates of a dropped layer stay in the
worker's model, and need no memory for a separate residual. Each worker decides alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from torch_hbmcomm import native
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.decision import DropRule, layers_of
from torch_hbmcomm.parameter_server.exchange import COUNTER_BYTES
from torch_hbmcomm.parameter_server.layout import Shard, travels_as, width
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.tensors import is_finite


class Selection(Protocol):
    """Chooses shards by the L1 or L2 sum of each shard's delta.

    `sums` has a sum for each of the layout's changing shards, in their order.
    """

    def delta_sum(self, delta: torch.Tensor) -> float:
        """Return the sum of one shard's delta, or 1.0 if the choice ignores sums; NaN if an
        element is not finite."""

    def choose(self, sums: Sequence[float]) -> Sequence[Shard]:
        """Return the shards that an exchange sends."""

    def pending(self, sums: Sequence[float]) -> Sequence[Shard]:
        """Return the shards with unsent changes."""

    def stats(self) -> dict[str, int | float]: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save. Call it when nothing waits to be sent."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a job, which may have had another selection."""


class SendAll:
    """The selection of a worker that drops nothing.

    changing: the layout's shards, except constants.
    """

    def __init__(self, changing: Sequence[Shard]) -> None:
        self._changing = changing

    def delta_sum(self, delta: torch.Tensor) -> float:
        return 1.0 if is_finite(delta) else math.nan

    def choose(self, sums: Sequence[float]) -> Sequence[Shard]:
        return self._changing

    def pending(self, sums: Sequence[float]) -> Sequence[Shard]:
        return self._changing

    def stats(self) -> dict[str, int | float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class AsyncLayerDrop:
    """The selection of a worker that drops layers.

    layers: the result of layers_in().
    changing: the layout's shards, except constants.
    """

    def __init__(self, drop: LayerDrop, layers: Sequence[Layer], changing: Sequence[Shard]) -> None:
        self._native = native.load()
        self._layers = layers
        self._changing = changing
        self._squares = drop.squares
        self._rule = DropRule(drop)
        self._sent = self._dropped = 0

    def delta_sum(self, delta: torch.Tensor) -> float:
        """Return the L1 sum, or the L2 sum (of squares); NaN if an element is not finite."""
        each = [delta]
        found = self._native.error_feedback_accumulate(each, [None], each, 1.0, self._squares)
        total = float(found[0, 0])
        if math.isfinite(total):
            return total
        return sys.float_info.max if is_finite(delta) else math.nan

    def choose(self, sums: Sequence[float]) -> Sequence[Shard]:
        by_layer = self._by_layer(sums)
        sent = self._rule.decide(self._layers, by_layer)
        self._rule.end_step(COUNTER_BYTES * len(by_layer) if any(sent) else 0)
        self._sent += sum(sent)
        self._dropped += sum(m != 0 and not s for m, s in zip(by_layer, sent, strict=True))
        return [shard for shard in self._changing if sent[shard.layer]]

    def pending(self, sums: Sequence[float]) -> Sequence[Shard]:
        by_layer = self._by_layer(sums)
        return [shard for shard in self._changing if by_layer[shard.layer] != 0]

    def stats(self) -> dict[str, int | float]:
        return {
            "sent_layers": self._sent,
            "dropped_layers": self._dropped,
            "threshold": self._rule.threshold,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"drop": self._rule.state_dict() | {"waited": {}}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "drop" in state:
            self._rule.load_state_dict(state["drop"])

    def _by_layer(self, sums: Sequence[float]) -> list[float]:
        found = [0.0] * len(self._layers)
        for shard, total in zip(self._changing, sums, strict=True):
            found[shard.layer] += total
        return found


def layers_in(tensors: Sequence[TensorSpec], transfer: str | None, drop: LayerDrop) -> list[Layer]:
    """Return one layer of all tensors that are always sent, then the layers that may be dropped.

    Buffers are always sent. The first layer is left out if it is empty. Members are indices of
    `tensors`. Constants are in no layer.

    transfer: as in lay_out()
    """

    def shape(index: int) -> Shape:
        tensor = tensors[index]
        wire = width(travels_as(tensor.dtype, transfer))
        return Shape(tensor.name, len(tensor.shape), tensor.count, wire)

    trained = [index for index, tensor in enumerate(tensors) if tensor.kind == "parameter"]
    always = [index for index, tensor in enumerate(tensors) if tensor.kind == "buffer"]
    droppable = []
    for layer in layers_of([shape(index) for index in trained], drop):
        members = tuple(trained[member] for member in layer.members)
        if layer.always:
            always += members
        else:
            droppable.append(replace(layer, members=members))
    shapes = [shape(index) for index in always]
    first = Layer(
        parameters=tuple(one.name for one in shapes),
        members=tuple(always),
        numel=sum(one.numel for one in shapes),
        nbytes=sum(one.numel * one.width for one in shapes),
        always=True,
    )
    return [first, *droppable] if always else droppable
