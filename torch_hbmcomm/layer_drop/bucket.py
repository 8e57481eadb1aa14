"""A bucket of DDP's, as layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch._C._distributed_c10d import GradBucket

from torch_hbmcomm.layer_drop.layers import Layer, Shape, layers_of
from torch_hbmcomm.layer_drop.names import Names, check_dtype
from torch_hbmcomm.layer_drop.terms import LayerDrop


@dataclass(frozen=True)
class Plan:
    """names, begins, counts: of the parameters, in the order of the bucket, in elements.

    wire: the dtype in which survivors travel.
    """

    names: tuple[str, ...]
    begins: tuple[int, ...]
    counts: tuple[int, ...]
    layers: Sequence[Layer]
    wire: torch.dtype

    def sums(self, values: Sequence[float]) -> list[float]:
        """Of each layer, the sum over its parameters."""
        return [sum(values[member] for member in layer.members) for layer in self.layers]


def plan_of(bucket: GradBucket, names: Names, terms: LayerDrop, wire: torch.dtype | None) -> Plan:
    """Raises TypeError and ValueError for what the hook cannot carry; nothing has moved."""
    parameters = bucket.parameters()
    named = names.of(parameters)
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise TypeError(
            f"the gradient of {', '.join(named)} is sparse, and layers are dropped of dense ones: "
            "make the module with sparse=False"
        )
    for name, parameter in zip(named, parameters, strict=True):
        check_dtype(name, parameter.dtype)
        if parameter.dtype != buffer.dtype:
            raise ValueError(
                f"{name} is {parameter.dtype} and its bucket {buffer.dtype}: what a wrapper such "
                "as fp16_compress_wrapper, or mixed_precision, rounds away is lost; use "
                "LayerDropState(wire_dtype=torch.bfloat16), which keeps it in the cache"
            )
    travels = wire if wire is not None and buffer.dtype == torch.float32 else buffer.dtype
    counts = tuple(parameter.numel() for parameter in parameters)
    shapes = [
        Shape(name, parameter.dim(), parameter.numel(), travels.itemsize)
        for name, parameter in zip(named, parameters, strict=True)
    ]
    begins = tuple(accumulate(counts[:-1], initial=0))
    return Plan(named, begins, counts, layers_of(shapes, terms), travels)
