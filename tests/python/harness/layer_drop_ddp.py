"""A model with given gradients, and a second implementation of layer dropping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from harness.context import Context
from harness.hooks import Hooked, layer_drop

SHAPES = [(7,), (61, 101), (3, 5, 7), (80, 80), (1,), (97, 89), (5000,), (41, 7, 31)]


class Weighted(nn.Module):
    """A model that returns the sum of its parameters, weighted by its inputs.

    So the inputs are the gradients of the parameters. A parameter whose input is None is not used.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
    ) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, *weights: torch.Tensor | None) -> torch.Tensor:
        # Use the parameters in an order that is not their own, so that DDP rebuilds its buckets.
        order = sorted(range(len(self.all)), key=lambda index: index % 3)
        used = [(self.all[i], weight) for i in order if (weight := weights[i]) is not None]
        return torch.stack([(parameter * weight).sum() for parameter, weight in used]).sum()


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **({"bucket_cap_mb": 0.05} | options))


def gradients(seed: int, rank: int, step: int, size: int) -> list[torch.Tensor]:
    """Return whole numbers, whose means over the ranks are whole too.

    Their range differs between parameters, steps and ranks.
    """
    draw = torch.Generator().manual_seed(seed + 1000 * step + rank)
    found = []
    for index, shape in enumerate(SHAPES):
        most = 1 + int(torch.randint(1, 3 + 2 * index, (), generator=draw))
        found.append(torch.randint(-most, most, shape, generator=draw) * float(size))
    return found


@dataclass
class Paper:
    """Simulates layer dropping on all ranks, and computes the result of each step.

    Each parameter is a layer. LayerDropState documents which layers are sent.
    """

    ratio: float
    every: int = 100
    warmup: int = 0
    representative: str = "mean"
    min_numel: int = 4096
    max_age: float = 40
    always_send: bool = True
    target: str = "bytes"
    threshold: float | None = None
    fixed: bool = False
    steps: int = 0
    debt: float = 0.0
    ages: list[int] = field(default_factory=lambda: [0] * len(SHAPES))
    residuals: list[list[torch.Tensor]] = field(default_factory=list)  # by rank
    sent: list[bool] = field(default_factory=list)

    def step(self, of_ranks: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        if not self.residuals:
            self.residuals = [[torch.zeros_like(g) for g in own] for own in of_ranks]
        for residual, own in zip(self.residuals, of_ranks, strict=True):
            for total, gradient in zip(residual, own, strict=True):
                total += gradient
        values = [self._value(index) for index in range(len(SHAPES))]
        zero = [all(not own[i].any() for own in of_ranks) for i in range(len(SHAPES))]
        self.sent = [
            not zero[i] and value > 0 and self._goes(i, value) for i, value in enumerate(values)
        ]
        yields = []
        for index, goes in enumerate(self.sent):
            total = torch.stack([residual[index] for residual in self.residuals]).mean(0)
            yields.append(total if goes else torch.zeros_like(total))
            if goes:
                for residual in self.residuals:
                    residual[index].zero_()
            self.ages[index] = 0 if goes or values[index] == 0 else self.ages[index] + 1
        self._move_threshold([(v, i) for i, v in enumerate(values) if not zero[i]])
        self.steps += 1
        return yields

    def _value(self, index: int) -> float:
        own = [residual[index].double() for residual in self.residuals]
        if self.representative == "l2":
            return math.sqrt(sum(float(one.square().sum()) for one in own) / len(own))
        total = sum(float(one.abs().sum()) for one in own) / len(own)
        return total if self.representative == "l1" else total / own[0].numel()

    def _goes(self, index: int, value: float) -> bool:
        small = math.prod(SHAPES[index]) < self.min_numel or len(SHAPES[index]) < 2
        if (small and self.always_send) or self.steps < self.warmup or self.threshold is None:
            return True
        if self.ages[index] >= self.max_age:
            return True
        eased = self.target == "bytes" and not self.fixed
        ease = 1 - (self.ages[index] / self.max_age) ** 2 if eased else 1.0
        return value >= self.threshold * ease

    def _move_threshold(self, values: list[tuple[float, int]]) -> None:
        if self.fixed or self.ratio == 0:
            return
        begin = max(self.warmup, 1) - 1
        total = sum(math.prod(shape) for shape in SHAPES)
        excess = 0.0
        if self.target == "bytes" and self.threshold is not None:
            elements = sum(math.prod(SHAPES[i]) for i, goes in enumerate(self.sent) if goes)
            sent = elements + len(SHAPES) * 16 / 4  # two float64 for each layer, to decide
            excess = sent / ((1 - self.ratio) * total) - 1
            self.debt = min(max(self.debt + excess, -10), 10)
        if self.steps >= begin and (self.steps - begin) % self.every == 0:
            dropped = 0
            for value, index in sorted(values):
                dropped += math.prod(SHAPES[index])
                if dropped > sum(math.prod(SHAPES[i]) for _, i in values) * self.ratio:
                    self.threshold = value
                    break
        elif self.target == "bytes" and self.threshold is not None:
            moved = self.threshold * math.exp(0.05 * excess + 0.005 * self.debt)
            positive = [value for value, _ in values if value > 0]
            self.threshold = min(max(moved, min(positive) / 2), max(positive) * 2)


def everyones(context: Context, step: int) -> list[list[torch.Tensor]]:
    return [gradients(context.seed, rank, step, context.size) for rank in range(context.size)]


def started(
    dtype: torch.dtype = torch.float32, ddp_options: Any = None, **options: Any
) -> tuple[DistributedDataParallel, hbmcomm.LayerDropState]:
    ddp = wrapped(Weighted(dtype), **(ddp_options or {}))
    return ddp, layer_drop(ddp, **options)


def backward(ddp: nn.Module, weights: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    ddp.zero_grad()
    ddp(*weights).backward()
    return [parameter.grad for parameter in ddp.parameters()]


def residuals_of(state: Hooked) -> list[torch.Tensor]:
    residuals = state.state_dict()["caches"]
    return [residuals.get(f"all.{i}", torch.zeros(shape)) for i, shape in enumerate(SHAPES)]
