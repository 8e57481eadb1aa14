"""Divides buckets into layers, and checks the order in which DDP passes its buckets."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.tensors import Orders, check_dense, local_part, memory_shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class BucketLayers:
    """The layers of one bucket.

    shapes: the parameters' shapes, in the bucket's order, with Shape.sizes.
    begins: the parameters' offsets in the bucket, in elements.
    wire: the dtype of gradients on the wire.
    device: the gradients' device.
    """

    shapes: tuple[Shape, ...]
    begins: tuple[int, ...]
    layers: Sequence[Layer]
    wire: torch.dtype
    device: torch.device

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(shape.name for shape in self.shapes)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of elements of each parameter."""
        return tuple(shape.numel for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters on the wire."""
        return sum(self.counts) * self.wire.itemsize

    def sent_as(self, wire: torch.dtype) -> BucketLayers:
        """Return the same layers with another dtype on the wire."""
        return self if wire == self.wire else replace(self, wire=wire)

    def range_of(self, index: int) -> tuple[int, int]:
        """Return the begin and end of a parameter in the bucket, in elements."""
        return self.begins[index], self.begins[index] + self.counts[index]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return, for each layer, the sum of its parameters' values."""
        return [sum(values[member] for member in layer.members) for layer in self.layers]


class BucketSource(ABC):
    """Follows the buckets of one model through each backward().

    Args:
        state: the name of the state's class, for errors
        wire: the dtype of float32 gradients on the wire; None: float32
        layers_of: the function that groups the parameters of a bucket into layers

    parameters: the parameters of which this rank has gradients, by name, as optimizers have them.
    """

    def __init__(
        self,
        state: str,
        wire: torch.dtype | None,
        layers_of: Callable[[Sequence[Shape]], list[Layer]],
    ) -> None:
        self._state = state
        self._wire = wire
        self._layers_of = layers_of
        self.parameters: dict[str, torch.Tensor] = {}

    @abstractmethod
    def open(self, bucket: Any) -> BucketLayers:
        """Return the layers of a bucket of backward()."""

    @property
    @abstractmethod
    def begins(self) -> bool:
        """True if the open bucket is the first one of a backward()."""

    @abstractmethod
    def close(self, bucket: Any) -> None:
        """End the open bucket, and expect the next one."""

    @abstractmethod
    def check_ended(self) -> None:
        """Raise RuntimeError if a backward() has begun and not ended."""

    @abstractmethod
    def check_orders(self) -> None:
        """Raise ValueError if a parameter's shape or memory order has changed."""

    @property
    def parts(self) -> Mapping[str, torch.Tensor]:
        """This rank's part of each parameter, by name; of an unsharded parameter all of it."""
        return {name: local_part(parameter) for name, parameter in self.parameters.items()}

    def layers_of_model(self) -> list[Layer]:
        """Return the layers of the whole model, as if it were one bucket."""
        return self._layers_of(self._shapes(self.parameters))

    def _bucket_layers(
        self, names: Sequence[str], begins: Sequence[int], buffer: torch.Tensor
    ) -> BucketLayers:
        shapes = self._shapes(names)
        return BucketLayers(
            shapes=shapes,
            begins=tuple(begins),
            layers=self._layers_of(shapes),
            wire=self._travels_as(buffer.dtype),
            device=buffer.device,
        )

    def _shapes(self, names: Iterable[str]) -> tuple[Shape, ...]:
        return tuple(
            Shape(
                name,
                part.dim(),
                part.numel(),
                self._travels_as(part.dtype).itemsize,
                tuple(memory_shape(part)),
            )
            for name, part in ((name, local_part(self.parameters[name])) for name in names)
        )

    def _travels_as(self, dtype: torch.dtype) -> torch.dtype:
        return self._wire if self._wire is not None and dtype == torch.float32 else dtype

    def _unended(self) -> RuntimeError:
        return RuntimeError(
            "the last backward() did not end, and part of its gradients has been sent: "
            f"continue from a checkpoint, with a new model and a new {self._state}"
        )


class Buckets(BucketSource):
    """Follows DDP's buckets.

    Raises TypeError and ValueError for a model whose gradients cannot be sent.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        state: str,
        wire: torch.dtype | None,
        layers_of: Callable[[Sequence[Shape]], list[Layer]],
    ) -> None:
        super().__init__(state, wire, layers_of)
        # DDP's reducer holds the hook's state where Python's garbage collector does not look. So a
        # strong reference to the model would keep the model and the state for ever.
        self._model = weakref.ref(model)
        self._orders = Orders()
        self._names: dict[int, str] = {}  # by the parameters' ids
        # The buckets of a backward(), in order: the ids of the parameters, and the layers.
        self._known: list[tuple[list[int], BucketLayers]] = []
        self._came = 0  # buckets of this backward() that were closed
        self._seen: set[int] = set()  # ids of these buckets' parameters
        self._unnumbered = False  # DDP gives each bucket of this backward() index 0
        check_dense(model.module)
        for full_name, parameter in model.module.named_parameters():
            name = full_name.replace("_orig_mod.", "")  # a prefix of torch.compile's
            if parameter.requires_grad:
                check_dtype(name, parameter.dtype)
                self.parameters[name] = parameter
                self._orders.add(name, parameter)
                self._names[id(parameter)] = name

    def open(self, bucket: GradBucket) -> BucketLayers:
        """Return the layers of the bucket. Makes them again if DDP has rebuilt its buckets.

        Raises:
            RuntimeError: this is not the next bucket of the backward()
            TypeError, ValueError: the hook cannot send the bucket; nothing was sent
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
        """True if the open bucket is the first one of a backward()."""
        return self._came == 0

    def close(self, bucket: GradBucket) -> None:
        """End the open bucket, and expect the next one."""
        self._seen.update(self._known[self._came][0])
        self._came += 1
        if bucket.is_last():
            self._end()

    def check_orders(self) -> None:
        """Raise ValueError if a parameter's shape or memory order has changed."""
        for name, parameter in self.parameters.items():
            self._orders.check(name, parameter)

    def check_ended(self) -> None:
        """Raise RuntimeError if a backward() has begun and not ended. Raises nothing if its buckets
        are unnumbered, because then its end cannot be recognised."""
        if self._came != 0 and not self._unnumbered:
            raise self._unended()

    def _end(self) -> None:
        self._came = 0
        self._seen.clear()
        self._unnumbered = False

    def _check_order(self, bucket: GradBucket, ids: Sequence[int]) -> None:
        """Raise RuntimeError if this is not the next bucket, ValueError under ddp.join().

        In the first iteration under static_graph=True, DDP gives every bucket index 0 and marks no
        bucket as the last. Then the next backward() begins with the first bucket that has a
        parameter of an earlier bucket.
        """
        model = self._model()
        static = model is not None and model.static_graph
        again = not self._seen.isdisjoint(ids)
        if self._unnumbered and again:
            self._end()
        elif self._came > 0 and bucket.index() == 0 and not again and static:
            self._unnumbered = self._unnumbered or self._came == 1
        if bucket.index() != (0 if self._unnumbered else self._came):
            raise RuntimeError(
                f"bucket {bucket.index()} came where bucket {self._came} was to come: a "
                f"backward() before did not end, or two DDP models share this {self._state}; make "
                "a new one for each"
            )
        if model is not None and model._join_config.enable:
            raise ValueError(
                "ddp.join() sends whole buckets of zeros for finished ranks, and the hook sends "
                "parts of buckets: leave it out, and give all ranks the same number of iterations"
            )

    def _layers_in(self, bucket: GradBucket) -> BucketLayers:
        parameters = bucket.parameters()
        names = [self._name(parameter) for parameter in parameters]
        buffer = bucket.buffer()
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.dtype != buffer.dtype:
                raise ValueError(
                    f"{name} is {parameter.dtype} and its bucket {buffer.dtype}: the rounding "
                    "error of a wrapper (fp16_compress_wrapper) or of mixed_precision is lost; set "
                    f"wire_dtype=torch.bfloat16 in the configuration of {self._state}, which keeps "
                    "the error for the next step"
                )
        counts = [parameter.numel() for parameter in parameters]
        parts = buffer.split(counts)
        for name, parameter, part in zip(names, parameters, parts, strict=True):
            self._orders.check_bucket(name, parameter, part)
        return self._bucket_layers(names, list(accumulate(counts[:-1], initial=0)), buffer)

    def _name(self, parameter: torch.Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} is not of the model that this "
                f"{self._state} works for: each model has a state of its own"
            )
        return name


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for gradients of a dtype that residuals cannot take."""
    if dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"the gradient of {name} is {dtype}; error feedback takes {allowed}")
