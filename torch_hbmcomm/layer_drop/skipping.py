"""Keeps an optimizer from moving layers that were dropped: a zero gradient would let weight decay
and momentum do so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Skipping:
    """Hides the gradients of the parameters in `dropped` while the optimizer steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.dropped: Iterable[torch.Tensor] = ()
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        optimizer.register_step_pre_hook(self._hide)
        optimizer.register_step_post_hook(self._show)

    def _hide(self, *_: Any) -> None:
        for parameter in self.dropped:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _show(self, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
