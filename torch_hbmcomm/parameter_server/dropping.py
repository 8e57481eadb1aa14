"""Layer-wise dropping (Lee et al. 2020): what of a worker's differences is sent, and what waits.

The difference between a worker's model and the weights that it took in last is the sum of all its
updates that were not sent, the paper's cache (equation 1). So a layer that is dropped is just left
as it is. Each worker decides alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_hbmcomm import native
from torch_hbmcomm.layer_drop.layers import Layer, Shape, layers_of
from torch_hbmcomm.layer_drop.rule import Rule
from torch_hbmcomm.layer_drop.terms import LayerDrop
from torch_hbmcomm.parameter_server.layout import Piece, Tensor, travels_as, width
from torch_hbmcomm.parameter_server.tensors import is_finite
from torch_hbmcomm.parameter_server.versions import COUNTER_BYTES


def layers_in(tensors: Sequence[Tensor], transfer: str | None, terms: LayerDrop) -> list[Layer]:
    """Those that may be dropped; and what is always sent, buffers too, as one that comes first.

    members: indices of tensors. Constants are in none. transfer: as lay_out()'s.
    """

    def shape(index: int) -> Shape:
        tensor = tensors[index]
        wire = width(travels_as(tensor.dtype, transfer))
        return Shape(tensor.name, len(tensor.shape), tensor.count, wire)

    trained = [index for index, tensor in enumerate(tensors) if tensor.kind == "parameter"]
    always = [index for index, tensor in enumerate(tensors) if tensor.kind == "buffer"]
    droppable = []
    for layer in layers_of([shape(index) for index in trained], terms):
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


class Dropping:
    """A Selection. layers: those of layers_in(); changing: the layout's."""

    def __init__(
        self, terms: LayerDrop, layers: Sequence[Layer], changing: Sequence[Piece]
    ) -> None:
        self._native = native.load()
        self._layers = layers
        self._changing = changing
        self._squares = terms.squares
        self._rule = Rule(terms)
        self._sent = self._dropped = 0

    def weigh(self, difference: torch.Tensor) -> float:
        """The moment: the sum of absolute values, or of squares."""
        each = [difference]
        found = self._native.layerdrop_accumulate(each, [None], each, 1.0, self._squares)
        moment = float(found[0, 0])
        if math.isfinite(moment):
            return moment
        return sys.float_info.max if is_finite(difference) else math.nan

    def choose(self, weights: Sequence[float]) -> Sequence[Piece]:
        moments = self._moments(weights)
        sent = self._rule.decide(self._layers, moments)
        self._rule.end_step(COUNTER_BYTES * len(moments) if any(sent) else 0)
        self._sent += sum(sent)
        self._dropped += sum(m != 0 and not s for m, s in zip(moments, sent, strict=True))
        return [piece for piece in self._changing if sent[piece.layer]]

    def pending(self, weights: Sequence[float]) -> Sequence[Piece]:
        moments = self._moments(weights)
        return [piece for piece in self._changing if moments[piece.layer] != 0]

    def stats(self) -> dict[str, int | float]:
        return {
            "sent_layers": self._sent,
            "dropped_layers": self._dropped,
            "threshold": self._rule.threshold,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"drop": self._rule.state_dict() | {"waited": {}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "drop" in state:
            self._rule.load_state_dict(state["drop"])

    def _moments(self, weights: Sequence[float]) -> list[float]:
        moments = [0.0] * len(self._layers)
        for piece, weight in zip(self._changing, weights, strict=True):
            moments[piece.layer] += weight
        return moments
