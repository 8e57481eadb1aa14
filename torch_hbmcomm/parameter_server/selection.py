"""The choice of the differences that a worker sends: everything, or layers by the rule of layer
dropping.

Layer-wise dropping follows Lee et al. 2020. The difference between a worker's model and the weights
that it took in last is the sum of all its updates that were not sent, the paper's cache (equation
1). So a layer that is dropped is just left as it is. Each worker decides alone.
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
from torch_hbmcomm.parameter_server.layout import Piece, travels_as, width
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.tensors import is_finite


class Selection(Protocol):
    """Chooses pieces by a moment of each one's difference.

    Moments are of the pieces of the layout that change, in their order.
    """

    def moment(self, difference: torch.Tensor) -> float:
        """Measure the difference of one piece; NaN if an element is not finite."""

    def choose(self, moments: Sequence[float]) -> Sequence[Piece]:
        """Return the pieces that an exchange sends."""

    def pending(self, moments: Sequence[float]) -> Sequence[Piece]:
        """Return all that is not sent yet."""

    def stats(self) -> dict[str, int | float]: ...

    def state_dict(self) -> dict[str, Any]:
        """Return what to save when nothing waits to be sent."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what a job saved that had this selection or another one."""


class SendAll:
    """The selection of a worker that drops nothing. changing: the layout's pieces."""

    def __init__(self, changing: Sequence[Piece]) -> None:
        self._changing = changing

    def moment(self, difference: torch.Tensor) -> float:
        return 1.0 if is_finite(difference) else math.nan

    def choose(self, moments: Sequence[float]) -> Sequence[Piece]:
        return self._changing

    def pending(self, moments: Sequence[float]) -> Sequence[Piece]:
        return self._changing

    def stats(self) -> dict[str, int | float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class AsyncLayerDrop:
    """The selection of a worker that drops layers.

    layers: of layers_in(). changing: the layout's pieces.
    """

    def __init__(self, drop: LayerDrop, layers: Sequence[Layer], changing: Sequence[Piece]) -> None:
        self._native = native.load()
        self._layers = layers
        self._changing = changing
        self._squares = drop.squares
        self._rule = DropRule(drop)
        self._sent = self._dropped = 0

    def moment(self, difference: torch.Tensor) -> float:
        """Return the sum of absolute values, or of squares."""
        each = [difference]
        found = self._native.error_feedback_accumulate(each, [None], each, 1.0, self._squares)
        moment = float(found[0, 0])
        if math.isfinite(moment):
            return moment
        return sys.float_info.max if is_finite(difference) else math.nan

    def choose(self, moments: Sequence[float]) -> Sequence[Piece]:
        by_layer = self._by_layer(moments)
        sent = self._rule.decide(self._layers, by_layer)
        self._rule.end_step(COUNTER_BYTES * len(by_layer) if any(sent) else 0)
        self._sent += sum(sent)
        self._dropped += sum(m != 0 and not s for m, s in zip(by_layer, sent, strict=True))
        return [piece for piece in self._changing if sent[piece.layer]]

    def pending(self, moments: Sequence[float]) -> Sequence[Piece]:
        by_layer = self._by_layer(moments)
        return [piece for piece in self._changing if by_layer[piece.layer] != 0]

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

    def _by_layer(self, moments: Sequence[float]) -> list[float]:
        found = [0.0] * len(self._layers)
        for piece, moment in zip(self._changing, moments, strict=True):
            found[piece.layer] += moment
        return found


def layers_in(tensors: Sequence[TensorSpec], transfer: str | None, drop: LayerDrop) -> list[Layer]:
    """Return the layers that may be dropped, after one of what is always sent, buffers too.

    Their members are indices of tensors; constants are in none. transfer: as lay_out()'s.
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
