"""The task of the parameter server's tests: to learn the outputs of a network of one layer.

Every process has equal samples and equal first weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

INPUTS = 12
CLASSES = 3
BATCH = 24  # of a step, for all workers together

Optimize = Callable[[Any], torch.optim.Optimizer]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 40)
        self.second = nn.Linear(40, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return found


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(3)
    _START = Network()
    _TEACHER = torch.randn(INPUTS, CLASSES)


def network() -> Network:
    """Return a network with equal weights in each call."""
    return copy.deepcopy(_START)


def samples(step: int, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(step))
    return inputs, (inputs @ _TEACHER).argmax(1)


def backward(model: nn.Module, step: int, worker: int = 0, workers: int = 1) -> torch.Tensor:
    """Compute the gradients of a worker's share of a step's samples. Returns the loss."""
    inputs, classes = (part.chunk(workers)[worker] for part in samples(step))
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), classes)
    loss.backward()
    return loss.detach()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def alone(optimize: Optimize, steps: int) -> dict[str, torch.Tensor]:
    """Train the reference: one process, all samples."""
    model = network()
    optimizer = optimize(model.parameters())
    for step in range(steps):
        backward(model, step)
        optimizer.step()
    return weights(model)


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-6, msg=name)
