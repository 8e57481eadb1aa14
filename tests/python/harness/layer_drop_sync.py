"""Layer dropping on the synchronous parameter server, simulated in plain PyTorch.

The simulation must choose the same layers as the server's workers. This is possible because
gradients are whole numbers, whose sums are exact in every order of addition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from harness.context import Context
from harness.synchronous import Optimize, weights
from torch_hbmcomm.layer_drop.config import LayerDrop

SHAPES = [(40, 50), (3, 7), (64,), (17, 31), (0, 5), (1,), (), (29, 8)]
STEPS = 12
DROP = LayerDrop(ratio=0.7, every=4, min_numel=8, max_age=5, target="paper")

Gradients = list[torch.Tensor | None]
Sent = dict[int, tuple[torch.Tensor, int]]
"""Sums of gradients by layer, each with the number of steps whose gradients it has."""


def model_of(dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(3)
    return nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES)


def gradients_of(context: Context, worker: int, step: int, missing: bool = True) -> Gradients:
    """Return whole numbers, with larger ones in some layers than in others.

    In the last layer the numbers are so small that the layer is sent late.

    missing: True: some layers have no gradient in some steps
    """
    generator = torch.Generator().manual_seed(context.seed + 1000 * worker + step)
    found: Gradients = []
    for index, shape in enumerate(SHAPES):
        values = torch.randint(-4, 5, shape, generator=generator).float()
        absent = missing and (index + worker + step) % 7 == 0
        scale = 1 if index == len(SHAPES) - 1 else 8 * 2 ** ((3 * index + worker) % 5)
        found.append(None if absent else values * scale)
    return found


def give(model: nn.Module, gradients: Gradients) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


class Worker:
    """A worker that sends some layers and accumulates the gradients of the rest."""

    def __init__(self, drop: LayerDrop) -> None:
        self.drop = drop
        self.residuals = [torch.zeros(shape) for shape in SHAPES]
        self.waited = [0] * len(SHAPES)
        self.threshold = -math.inf
        self.steps = 0

    def value(self, index: int) -> float:
        residual = self.residuals[index].double()
        return float(residual.norm() if self.drop.representative == "l2" else residual.abs().mean())

    def goes(self, index: int) -> bool:
        residual = self.residuals[index]
        always = residual.dim() < 2 or residual.numel() < self.drop.least_numel
        late = self.waited[index] >= self.drop.oldest
        return bool(residual.any()) and (always or late or self.value(index) >= self.threshold)

    def search(self, fresh: Sequence[int]) -> float:
        """Return the threshold.

        It is the least score at which the layers of `fresh` with this score or less have more than
        drop.unsent of the elements of `fresh`.
        """
        found = sorted((self.value(index), self.residuals[index].numel()) for index in fresh)
        reached = itertools.accumulate(size for _, size in found)
        budget = self.drop.unsent * sum(size for _, size in found)
        return next(value for (value, _), size in zip(found, reached, strict=True) if size > budget)

    def step(self, gradients: Gradients) -> Sent:
        fresh = [i for i, g in enumerate(gradients) if g is not None and g.numel()]
        for index in fresh:
            gradient = gradients[index]
            assert gradient is not None
            self.residuals[index] += gradient
        sent = [index for index in fresh if self.goes(index)]
        if self.steps % self.drop.every == 0:
            self.threshold = self.search(fresh)
        self.steps += 1
        taken = self.take(sent)
        for index, residual in enumerate(self.residuals):
            waits = index not in sent and bool(residual.any())
            self.waited[index] = self.waited[index] + 1 if waits else 0
        return taken

    def take(self, sent: Sequence[int]) -> Sent:
        taken: Sent = {}
        for index in sent:
            taken[index] = self.residuals[index], self.waited[index] + 1
            self.residuals[index] = torch.zeros(SHAPES[index])
        return taken

    def flush(self) -> Sent:
        return self.take([index for index, residual in enumerate(self.residuals) if residual.any()])


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, brought: list[Sent], batches: int
) -> None:
    """Step as the server does. A parameter that no worker sent has no gradient.

    SGD makes the first move of a late layer. Then the layer makes a move for each step that it has
    waited. A move is the one before, multiplied by the momentum.
    """
    late = []
    for index, parameter in enumerate(model.parameters()):
        some = [one[index] for one in brought if index in one]
        gradients, ages = zip(*some, strict=True) if some else ((), ())
        parameter.grad = torch.stack(gradients).sum(0) / batches if some else None
        late += [(parameter, [age - 1 for age in ages])] if some else []
    optimizer.step()
    (group,) = optimizer.param_groups
    for parameter, waits in late:
        buffer = optimizer.state[parameter]["momentum_buffer"]
        gradient, moved = parameter.grad, 0.0
        assert gradient is not None
        kept = [group["momentum"] ** wait for wait in waits]
        for wait in waits:
            moved += sum(group["momentum"] ** step for step in range(1, wait + 1)) / len(waits)
        buffer -= (1 - sum(kept) / len(kept)) * gradient
        parameter.data -= group["lr"] * moved * gradient


def simulated(
    context: Context, drop: LayerDrop, workers: int, optimize: Optimize
) -> list[torch.Tensor]:
    model = model_of()
    optimizer = optimize(model.parameters())
    all_workers = [Worker(drop) for _ in range(workers)]
    for step in range(STEPS):
        brought = [w.step(gradients_of(context, n, step)) for n, w in enumerate(all_workers)]
        update(model, optimizer, brought, workers)
    update(model, optimizer, [worker.flush() for worker in all_workers], workers)
    return weights(model)
