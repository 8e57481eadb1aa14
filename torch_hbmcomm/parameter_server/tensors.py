"""A model's tensors, as the parameter servers handle them."""

from __future__ import annotations

import torch
from torch import nn

from torch_hbmcomm.parameter_server.layout import Tensor


def model_tensors(model: nn.Module, shared_buffers: bool) -> list[tuple[str, torch.Tensor, str]]:
    """Names, tensors and kinds (layout.Tensor) of all that a model has."""
    found: list[tuple[str, torch.Tensor, str]] = [
        (name, parameter, "parameter" if parameter.requires_grad else "constant")
        for name, parameter in model.named_parameters()
    ]
    found += [
        (name, buffer, "buffer" if shared_buffers and buffer.is_floating_point() else "constant")
        for name, buffer in model.named_buffers()
    ]
    if not any(kind == "parameter" for _, _, kind in found):
        raise ValueError("the model has no parameter that requires a gradient")
    return found


def described(name: str, tensor: torch.Tensor, kind: str) -> Tensor:
    """As the layout needs it. Raises TypeError for what is no dense CPU tensor, ValueError where
    the elements do not fill a range of memory."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise TypeError(
            f"{kind} {name} is {tensor.layout} on {tensor.device}: only dense CPU tensors"
        )
    if not _fills_memory(tensor):
        raise ValueError(
            f"{kind} {name} of shape {list(tensor.shape)} has strides {list(tensor.stride())}: it "
            "does not fill a range of memory; make it contiguous"
        )
    strides = tuple(
        step if length > 1 else 0
        for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return Tensor(
        name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), strides, kind
    )


def check_dense(model: nn.Module) -> None:
    """Raises ValueError for an embedding whose gradients are sparse."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name} is an embedding with sparse gradients, and only dense ones travel: give "
                "it sparse=False"
            )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in the order of memory, in one dimension, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _fills_memory(tensor: torch.Tensor) -> bool:
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if step != expected:
                return False
            expected *= length
    return True


def is_finite(values: torch.Tensor) -> bool:
    """Whether all elements are. Their sum tells in one fast pass, but may overflow; then each is
    looked at."""
    wide = torch.float32 if values.dtype.itemsize == 2 else None
    return bool(values.sum(dtype=wide).isfinite()) or bool(values.isfinite().all())
