"""Checks of a model's tensors, for DDP hooks and parameter servers, and flat views of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def check_fills_memory(
    kind: str, name: str, tensor: torch.Tensor, *, any_device: bool = False
) -> None:
    """Check that a tensor can be sent as one range of memory.

    Raises TypeError for a tensor that is not dense and, without `any_device`, for a tensor that is
    not on the CPU. Raises ValueError if the elements do not fill a range of memory.

    kind: the kind of tensor, such as "parameter", for the error
    """
    if not (any_device or tensor.is_cpu) or tensor.layout != torch.strided:
        raise TypeError(
            f"{kind} {name} is {tensor.layout} on {tensor.device}: only dense CPU tensors"
        )
    if not fills_memory(tensor):
        raise ValueError(
            f"{kind} {name} of shape {list(tensor.shape)} has strides "
            f"{list(tensor.stride())}: it does not fill a range of memory; make it "
            "contiguous"
        )


def fills_memory(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill one range of memory, and no two share an address."""
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if step != expected:
                return False
            expected *= length
    return True


def check_dense(model: nn.Module) -> None:
    """Raise ValueError for an embedding whose gradients are sparse."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name} is an embedding with sparse gradients, and only dense gradients are sent: "
                "give it sparse=False"
            )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements in the order of memory, in one dimension, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, which shares its memory; any other tensor itself."""
    to_local = getattr(tensor.detach(), "to_local", None)
    return tensor if to_local is None else to_local()


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the parameter's gradient in a bucket of DDP. They are the parameter's
    strides if it fills a range of memory, otherwise the strides of a contiguous tensor."""
    if fills_memory(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def same_order(shape: Sequence[int], strides: Sequence[int], other_strides: Sequence[int]) -> bool:
    """Return true if both strides put the elements of this shape into the same order of memory."""
    return all(
        one == other or length <= 1
        for length, one, other in zip(shape, strides, other_strides, strict=True)
    )


def memory_shape(parameter: torch.Tensor) -> list[int]:
    """Return the lengths of the dimensions of the parameter's gradient in the order of memory, the
    outermost first."""
    pairs = zip(gradient_strides(parameter), parameter.shape, strict=True)
    return [length for _, length in sorted(pairs, key=lambda pair: -pair[0])]


class Orders:
    """The memory order of each parameter's gradient in DDP's buckets. The order must not change
    between steps, because flat copies of the gradients of several steps are added up."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[torch.Size, tuple[int, ...], tuple[int, ...]]] = {}

    def add(self, name: str, parameter: torch.Tensor) -> None:
        self._known[name] = parameter.shape, parameter.stride(), gradient_strides(parameter)

    def check(self, name: str, parameter: torch.Tensor) -> None:
        """Raise ValueError if the parameter has another shape or order than when it was added."""
        shape, strides, order = self._known[name]
        if parameter.shape != shape or (
            parameter.stride() != strides
            and not same_order(shape, gradient_strides(parameter), order)
        ):
            raise ValueError(
                f"{name} of shape {list(shape)} had strides {list(strides)} when the hook's state "
                f"was made, and has shape {list(parameter.shape)} and strides "
                f"{list(parameter.stride())} now: earlier gradients would be permuted. "
                + _BEFORE_WRAPPING
            )

    def check_bucket(self, name: str, parameter: torch.Tensor, part: torch.Tensor) -> None:
        """Check the memory order of the parameter's part of a bucket.

        REQUIRES: the bucket has not been averaged yet, so the part has the elements of .grad.

        Raises ValueError if the part equals .grad only in another order. DDP chooses the order in
        its constructor, and keeps that order until it rebuilds its buckets.
        """
        shape, strides, order = self._known[name]
        gradient = parameter.grad
        if gradient is None or gradient.dtype != part.dtype or _fills_in_one_way(shape):
            return
        if part.as_strided(shape, order, part.storage_offset()).equal(gradient):
            return
        for other in _other_orders(shape):
            if part.as_strided(shape, other, part.storage_offset()).equal(gradient):
                raise ValueError(
                    f"{name} of shape {list(shape)} has strides {list(strides)}, and had others "
                    "when DistributedDataParallel was made. " + _BEFORE_WRAPPING
                )


_BEFORE_WRAPPING = (
    "Choose the memory format before DistributedDataParallel(...), as in "
    "model.to(memory_format=torch.channels_last)"
)


def _fills_in_one_way(shape: Sequence[int]) -> bool:
    """Return true if all dense tensors of this shape have their elements in one order."""
    return sum(length > 1 for length in shape) < 2


def _other_orders(shape: torch.Size) -> list[tuple[int, ...]]:
    """Return the strides of this shape in each of PyTorch's memory formats."""
    formats = [torch.contiguous_format]
    if len(shape) in (4, 5):
        formats.append(torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    return [torch.empty(shape, device="meta", memory_format=one).stride() for one in formats]


def is_finite(values: torch.Tensor) -> bool:
    """Return True if all elements are finite.

    A finite sum proves it in one fast pass. Finite elements may have a sum that overflows, so each
    element is checked if the sum is not finite.
    """
    wide = torch.float32 if values.dtype.itemsize == 2 else None
    return bool(values.sum(dtype=wide).isfinite()) or bool(values.isfinite().all())


def power_of_two_above(values: torch.Tensor) -> torch.Tensor:
    """Return for each value the least power of two that is not smaller, and is normal."""
    values = values.clamp(min=torch.finfo(values.dtype).tiny)
    mantissa = torch.frexp(values).mantissa  # in [0.5, 1); the quotient below is exact
    return torch.where(mantissa == 0.5, values, values / mantissa)
