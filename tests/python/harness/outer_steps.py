"""Models, data and a serial reference for tests of OuterSteps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torch_hbmcomm as hbmcomm

WIDTH = 5


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small model. Its initial weights are the same in every call."""
    torch.manual_seed(3)
    layers = nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3)
    return nn.Sequential(*layers).to(dtype)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def inner_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rank: int, step: int
) -> None:
    """Take a step on the data of this rank and step."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * rank + step)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def vector(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def outer_vector(outer: hbmcomm.OuterSteps, model: nn.Module) -> torch.Tensor:
    with outer.weights():
        return vector(model).clone()


class Serial:
    """The algorithms of DiLoCo and Streaming DiLoCo, with all workers in one process.

    OuterSteps has the same options. PyTorch's SGD is the outer optimizer.
    """

    def __init__(
        self,
        workers: int,
        seed: int,
        make: Callable[[], nn.Module] = net,
        *,
        every: int,
        outer_lr: float = 0.7,
        momentum: float = 0.5,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
    ) -> None:
        self.models = [make() for _ in range(workers)]
        self._optimizers = [adam(model) for model in self.models]
        self._seed = seed
        self._interval = every // fragments
        self._delay, self._alpha = delay, alpha
        start = vector(self.models[0]).clone()
        self._outer = list(start.split(-(-len(start) // fragments)))
        self._steppers = [
            torch.optim.SGD([one], lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
            for one in self._outer
        ]
        self._steps = self._meetings = 0
        self._travels: tuple[int, list[torch.Tensor]] | None = None

    def step(self) -> None:
        for rank, model in enumerate(self.models):
            inner_step(model, self._optimizers[rank], self._seed, rank, self._steps)
        self._steps += 1
        if self._travels is not None and self._steps - self._travels[0] >= self._delay:
            self._apply()
        if self._steps % self._interval == 0:
            self._apply()
            self._travels = self._steps, self._parts()
            if self._delay == 0:
                self._apply()

    def close(self) -> None:
        self._apply()
        for _ in self._outer:
            outer = self._outer[self._meetings % len(self._outer)]
            outer.add_(mean([part - outer for part in self._parts()]))
            self._set([outer] * len(self.models))
            self._meetings += 1

    def outer(self) -> torch.Tensor:
        return torch.cat(self._outer)

    def _apply(self) -> None:
        if self._travels is None:
            return
        before = self._travels[1]
        self._travels = None
        index = self._meetings % len(self._outer)
        outer = self._outer[index]
        outer.grad = -mean([part - outer for part in before])
        self._steppers[index].step()
        found = []
        for now, then in zip(self._parts(), before, strict=True):
            if self._alpha is None:
                found.append(outer + (now - then))
            else:
                found.append(torch.lerp(outer, now, self._alpha))
        self._set(found)
        self._meetings += 1

    def _parts(self) -> list[torch.Tensor]:
        """Return each worker's weights of the next fragment."""
        index = self._meetings % len(self._outer)
        size = self._outer[0].numel()
        return [vector(model).split(size)[index].clone() for model in self.models]

    def _set(self, parts: Sequence[torch.Tensor]) -> None:
        index = self._meetings % len(self._outer)
        size = self._outer[0].numel()
        for model, part in zip(self.models, parts, strict=True):
            pieces: list[Any] = list(vector(model).clone().split(size))
            pieces[index] = part
            vector_to_parameters(torch.cat(pieces), model.parameters())


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean, added up in the order of the workers."""
    total = tensors[0].clone()
    for one in tensors[1:]:
        total += one
    return total / len(tensors)


class Counting(nn.Module):
    """A vector that each step moves by whole numbers."""

    def __init__(self, count: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, dtype=dtype))

    def started(self, **options: Any) -> tuple[torch.optim.Optimizer, hbmcomm.OuterSteps]:
        """Return an optimizer that adds the negative gradient, and OuterSteps that averages."""
        optimizer = torch.optim.SGD(self.parameters(), lr=1)
        settings = {"every": None, "outer_lr": 1.0, "momentum": 0.0} | options
        return optimizer, hbmcomm.OuterSteps(self, optimizer, **settings)

    def move(self, optimizer: torch.optim.Optimizer, by: torch.Tensor | float) -> None:
        self.weight.grad = -torch.as_tensor(by).to(self.weight.dtype).expand_as(self.weight)
        optimizer.step()
