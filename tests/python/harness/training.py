"""A small model and its training, the same for whichever group it runs over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness.context import Context

WIDTH = 24
STEPS = 4


class Net(nn.Module):
    """Three layers; `second` is used in every other call only, if `sometimes`."""

    def __init__(self, sometimes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.third = nn.Linear(4 * WIDTH, WIDTH)
        self.sometimes = sometimes
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.relu(self.first(inputs))
        if not self.sometimes or self.calls % 2:
            hidden = torch.relu(self.second(hidden))
        out: torch.Tensor = self.third(hidden)
        return out


def net(**options: Any) -> Net:
    torch.manual_seed(7)
    return Net(**options)


def batch(context: Context, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's own data of a step, the same in both runs."""
    generator = torch.Generator().manual_seed(context.seed + 100 * step + context.rank)
    inputs = torch.randn(8, WIDTH, generator=generator)
    return inputs, torch.randn(8, WIDTH, generator=generator)


def loss_of(model: Callable[..., Any], context: Context, step: int) -> torch.Tensor:
    inputs, targets = batch(context, step)
    return nn.functional.mse_loss(model(inputs).float(), targets)


def train(model: nn.Module, context: Context, steps: int = STEPS) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
