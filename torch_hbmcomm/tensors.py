"""Checks of a model's tensors for the trainers, and flat views of them."""

from __future__ import annotations

import torch
from torch import nn


def check_fills_memory(
    kind: str, name: str, tensor: torch.Tensor, *, any_device: bool = False
) -> None:
    """Check that a tensor can travel as one range of memory.

    Raises TypeError for what is no dense tensor, or is not on the CPU unless `any_device`;
    ValueError where the elements do not fill a range of memory. kind: "parameter" or the like, for
    the message.
    """
    if not (any_device or tensor.is_cpu) or tensor.layout != torch.strided:
        raise TypeError(
            f"{kind} {name} is {tensor.layout} on {tensor.device}: only dense CPU tensors"
        )
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if step != expected:
                raise ValueError(
                    f"{kind} {name} of shape {list(tensor.shape)} has strides "
                    f"{list(tensor.stride())}: it does not fill a range of memory; make it "
                    "contiguous"
                )
            expected *= length


def check_dense(model: nn.Module) -> None:
    """Raise ValueError for an embedding whose gradients are sparse."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name} is an embedding with sparse gradients, and only dense ones travel: give "
                "it sparse=False"
            )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements in the order of memory, in one dimension, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def memory_shape(tensor: torch.Tensor) -> list[int]:
    """Return the lengths of a tensor's dimensions in the order of memory, the outermost first."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [length for _, length in sorted(pairs, key=lambda pair: -pair[0])]


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all elements are finite.

    Their sum tells in one fast pass, but may overflow; then each is looked at.
    """
    wide = torch.float32 if values.dtype.itemsize == 2 else None
    return bool(values.sum(dtype=wide).isfinite()) or bool(values.isfinite().all())
