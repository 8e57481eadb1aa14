"""Workers of OuterSteps over boxes, which take turns in one thread, and a serial reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

import torch_hbmcomm as hbmcomm
from harness.outer_steps import Counting
from harness.ps_workers import WAIT_SECONDS, Boxes


class BoxWorker:
    """A worker with connections of its own. Plain SGD at a rate of 1 moves its model.

    options: of OuterSteps; by default the outer weights move by the mean delta
    """

    def __init__(self, boxes: Boxes, model: nn.Module | None = None, **options: Any) -> None:
        self.model: Any = Counting() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        settings: dict[str, Any] = {"every": None, "outer_lr": 1.0, "momentum": 0.0}
        settings |= {"timeout": WAIT_SECONDS, **options}
        with ExitStack() as resources:
            box = resources.enter_context(boxes.connected())
            self.outer = hbmcomm.OuterSteps(self.model, self.optimizer, box=box, **settings)
            resources.callback(self.outer.close)
            self._resources = resources.pop_all()

    def move(self, by: torch.Tensor | float) -> None:
        """Take a step that adds `by` to a Counting model."""
        assert isinstance(self.model, Counting)
        self.model.move(self.optimizer, by)
        self.outer.step()

    def close(self) -> None:
        """Close OuterSteps, then the connections."""
        self._resources.close()

    @property
    def inner(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    @property
    def weights(self) -> torch.Tensor:
        """The outer weights."""
        with self.outer.weights():
            return self.inner


@contextmanager
def workers(boxes: Boxes, count: int, *models: nn.Module, **options: Any) -> Iterator[Any]:
    """Yield `count` workers, all of which have joined."""
    with ExitStack() as stack:
        found = []
        for index in range(count):
            model = models[index] if models else None
            found.append(BoxWorker(boxes, model, **options))
            stack.callback(found[-1].close)
        yield found


class Arrivals:
    """The outer weights, as arrivals of workers move them one after another.

    Each worker keeps the momentum of its own deltas.
    """

    def __init__(self, start: torch.Tensor, workers: int, outer_lr: float, momentum: float) -> None:
        self.outer = start.clone()
        self.taken = [start.clone() for _ in range(workers)]
        self._momenta = [torch.zeros_like(start) for _ in range(workers)]
        self._outer_lr, self._momentum = outer_lr, momentum

    def arrive(self, worker: int, inner: torch.Tensor) -> None:
        """Move the outer weights by the worker's delta, and let it take them."""
        delta = inner - self.taken[worker]
        self._momenta[worker] = self._momentum * self._momenta[worker] + delta
        step = delta + self._momentum * self._momenta[worker]
        self.outer = self.outer + self._outer_lr / len(self.taken) * step
        self.taken[worker] = self.outer.clone()
