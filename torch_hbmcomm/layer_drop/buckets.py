"""DDP's buckets, in the order in which they come, as layers of named parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.decision import Layer, Shape, layers_of
from torch_hbmcomm.layer_drop.ranks import Matrix, matrix_of
from torch_hbmcomm.tensors import Orders, check_dense, memory_shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class BucketLayers:
    """The layers of one bucket.

    names, begins, counts: of its parameters, in its order; begins and counts in elements.
    wire: the dtype in which survivors travel.
    device: where the gradients lie.
    matrices: by parameter, where it can be approximated; None: it is always sent whole.
    """

    names: tuple[str, ...]
    begins: tuple[int, ...]
    counts: tuple[int, ...]
    layers: Sequence[Layer]
    wire: torch.dtype
    matrices: tuple[Matrix | None, ...]
    device: torch.device

    @property
    def nbytes(self) -> int:
        """The bytes of all on the wire."""
        return sum(self.counts) * self.wire.itemsize

    def sums(self, values: Sequence[float]) -> list[float]:
        """Add up values of parameters to values of layers."""
        return [sum(values[member] for member in layer.members) for layer in self.layers]


class Buckets:
    """Follows the buckets of one model through each backward().

    Args:
        model: None: parameters are numbered as they come in the first step, and cannot be saved
        config: what a layer is
        wire: the dtype in which gradients of float32 travel; None: as they are

    Raises TypeError and ValueError for a model whose gradients cannot be carried.
    """

    def __init__(
        self, model: DistributedDataParallel | None, config: LayerDrop, wire: torch.dtype | None
    ) -> None:
        self._model = model
        self._config = config
        self._wire = wire
        self._parameters = _Parameters(None if model is None else model.module)
        self._known: list[tuple[list[int], BucketLayers]] = []  # with the parameters' ids
        self._came = 0  # buckets of this backward()
        self._seen: set[int] = set()  # ids of their parameters
        self._unnumbered = False  # whether each of several buckets has index 0
        self._first_ended = False

    @property
    def named(self) -> bool:
        """Whether parameters have names that a checkpoint can use."""
        return self._model is not None

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name; without a model, those that have come so far."""
        return self._parameters.by_name

    @property
    def layers(self) -> list[Layer]:
        """The layers of all buckets that have come."""
        return [layer for _, bucket in self._known for layer in bucket.layers]

    def open(self, bucket: GradBucket) -> BucketLayers:
        """Return the layers of the bucket, found again when DDP has arranged its buckets again.

        Raises:
            RuntimeError: another bucket was to come
            TypeError, ValueError: the hook cannot carry the bucket; nothing has moved
        """
        ids = [id(parameter) for parameter in bucket.parameters()]
        self._check_order(bucket, ids)
        if self._came == len(self._known):
            self._known.append((ids, self._layers_in(bucket)))
        elif self._known[self._came][0] != ids:
            self._known[self._came] = ids, self._layers_in(bucket)
        return self._known[self._came][1]

    @property
    def begins(self) -> bool:
        """Whether the bucket that was opened is the first one of a backward()."""
        return self._came == 0

    def close(self, bucket: GradBucket) -> None:
        """Expect the next bucket."""
        self._came += 1
        self._seen.update(id(parameter) for parameter in bucket.parameters())
        if bucket.is_last():
            self._end()

    def first_ended(self) -> bool:
        """Return whether the first backward() has ended; True once."""
        ended, self._first_ended = self._first_ended, False
        return ended

    def check_orders(self) -> None:
        """Raise ValueError if a parameter's shape or memory order has changed."""
        for name, parameter in self._parameters.by_name.items():
            self._parameters.orders.check(name, parameter)

    def check_ended(self) -> None:
        """Raise RuntimeError in the middle of a backward()."""
        if self._came != 0 and not self._unnumbered:
            raise RuntimeError(
                "the last backward() did not end, and part of its gradients has been sent: go on "
                "from a checkpoint, with a new model and a new LayerDropState"
            )

    def _end(self) -> None:
        self._came = 0
        self._seen.clear()
        self._unnumbered = False
        self._first_ended |= self._parameters.complete()

    def _check_order(self, bucket: GradBucket, ids: Sequence[int]) -> None:
        """In the first iteration under static_graph=True, DDP gives every bucket index 0, and says
        of none of several that it is the last one: the next backward() begins when a parameter
        comes again."""
        again = not self._seen.isdisjoint(ids)
        if self._unnumbered and again:
            self._end()
        elif self._came > 0 and bucket.index() == 0 and not again and self._is_static:
            self._unnumbered = self._unnumbered or self._came == 1
        if bucket.index() != (0 if self._unnumbered else self._came):
            raise RuntimeError(
                f"bucket {bucket.index()} came where bucket {self._came} was to come: a "
                "backward() before did not end, or two DDP models share this LayerDropState; make "
                "a new one for each"
            )
        if self._model is not None and self._model._join_config.enable:
            raise ValueError(
                "ddp.join() stands in for ranks that are done with zeros for each bucket as a "
                "whole, and dropped layers are not sent: leave it out, and give all ranks the same "
                "number of iterations"
            )

    @property
    def _is_static(self) -> bool:
        """Whether the model may have a static graph."""
        return self._model is None or bool(self._model.static_graph)

    def _layers_in(self, bucket: GradBucket) -> BucketLayers:
        parameters = bucket.parameters()
        names = self._parameters.names_of(parameters)
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise TypeError(
                f"the gradient of {', '.join(names)} is sparse, and layers are dropped of dense "
                "ones: make the module with sparse=False"
            )
        for name, parameter in zip(names, parameters, strict=True):
            check_dtype(name, parameter.dtype)
            if parameter.dtype != buffer.dtype:
                raise ValueError(
                    f"{name} is {parameter.dtype} and its bucket {buffer.dtype}: what a wrapper "
                    "such as fp16_compress_wrapper, or mixed_precision, rounds away is lost; use "
                    "LayerDropState(wire_dtype=torch.bfloat16), which keeps it in the cache"
                )
        narrows = buffer.dtype == torch.float32
        wire = self._wire if self._wire is not None and narrows else buffer.dtype
        counts = tuple(parameter.numel() for parameter in parameters)
        shapes = [
            Shape(name, parameter.dim(), parameter.numel(), wire.itemsize)
            for name, parameter in zip(names, parameters, strict=True)
        ]
        begins = tuple(accumulate(counts[:-1], initial=0))
        parts = buffer.split(counts)
        for name, parameter, part in zip(names, parameters, parts, strict=True):
            self._parameters.orders.check_bucket(name, parameter, part)
        layers = layers_of(shapes, self._config)
        always = {member for layer in layers if layer.always for member in layer.members}
        matrices = tuple(
            None if index in always else matrix_of(name, memory_shape(parameter), wire.itemsize)
            for index, (name, parameter) in enumerate(zip(names, parameters, strict=True))
        )
        if self._config.target == "low_rank":  # where each parameter is a layer
            layers = [
                replace(layer, always=matrix is None)
                for layer, matrix in zip(layers, matrices, strict=True)
            ]
        return BucketLayers(names, begins, counts, layers, wire, matrices, buffer.device)


class _Parameters:
    """The parameters of a model by name, or without a model those that came, by number."""

    def __init__(self, model: nn.Module | None) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self.orders = Orders()
        self._names: dict[int, str] = {}
        self._model = model
        self._complete = False
        if model is not None:
            check_dense(model)
            for full_name, parameter in model.named_parameters():
                name = full_name.replace("_orig_mod.", "")  # of a model that torch.compile wraps
                if parameter.requires_grad:
                    check_dtype(name, parameter.dtype)
                    self._add(name, parameter)

    def names_of(self, parameters: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Return the parameters' names. Raises ValueError for a parameter that is not the
        model's."""
        return tuple(self._name(parameter) for parameter in parameters)

    def complete(self) -> bool:
        """Take no further parameters. Returns whether that is new."""
        first, self._complete = not self._complete, True
        return first

    def _name(self, parameter: torch.Tensor) -> str:
        found = self._names.get(id(parameter))
        if found is None:
            if self._model is not None or self._complete:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is not of the model that this "
                    "LayerDropState works for: each model has a state of its own"
                )
            found = f"parameter {len(self._names)}"
            self._add(found, parameter)
        return found

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        self.by_name[name] = parameter
        self.orders.add(name, parameter)
        self._names[id(parameter)] = name


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for gradients of a dtype that cannot be cached."""
    if dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"the gradient of {name} is {dtype}; layers are dropped of {allowed}")
