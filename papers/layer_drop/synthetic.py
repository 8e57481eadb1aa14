"""A model whose backward pass costs next to nothing, so that a step is communication."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

_SIGNAL = 0.2  # magnitude of the part common to all steps and ranks; the noise's is 1
_POOL = 1 << 22  # random numbers; more than the largest layer has elements
_IMAGES, _SIDE = 4, 64  # for the only real backward pass


class Synthetic(nn.Module):
    """A module with the parameters of `model`, and synthetic gradients.

    The gradients' magnitudes come from one real backward pass. A gradient is the sum of a part that
    is equal in all steps and on all ranks, and of noise.

    forward() has no argument and returns 0. backward() writes the gradients directly to .grad.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.model = model
        torch.manual_seed(0)
        magnitudes = _magnitudes(model)
        self._signals = [
            _SIGNAL * magnitude * torch.randn_like(parameter)
            for parameter, magnitude in zip(model.parameters(), magnitudes, strict=True)
        ]
        self._magnitudes = magnitudes
        self._pool = torch.randn(_POOL)
        self._random = torch.Generator().manual_seed(rank)
        self._layers = list(model.parameters())
        for parameter in self._layers:
            parameter.grad = torch.zeros_like(parameter)

    def forward(self) -> torch.Tensor:
        token = torch.zeros(())
        for layer, parameter in enumerate(self._layers):
            token = _Layer.apply(  # type: ignore[no-untyped-call]
                partial(self._fill, layer), token, parameter
            )
        return token

    def _fill(self, layer: int) -> None:
        gradient = self._layers[layer].grad
        assert gradient is not None
        count = gradient.numel()
        start = int(torch.randint(_POOL - count, (), generator=self._random))
        noise = self._pool[start : start + count].view_as(gradient)
        torch.add(self._signals[layer], noise, alpha=self._magnitudes[layer], out=gradient)


class _Layer(torch.autograd.Function):
    """A layer that writes its gradient before autograd reports this gradient as ready."""

    @staticmethod
    def forward(
        context: Any, fill: Callable[[], None], token: torch.Tensor, parameter: torch.Tensor
    ) -> torch.Tensor:
        context.fill = fill
        return token.clone()

    @staticmethod
    def backward(context: Any, token: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        context.fill()
        return None, token, None


def _magnitudes(model: nn.Module) -> list[float]:
    """Return the mean absolute gradient of each parameter."""
    images = torch.randn(_IMAGES, 3, _SIDE, _SIDE)
    cross_entropy(model(images), torch.arange(_IMAGES)).backward()
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(float(parameter.grad.abs().mean()))
    return found
