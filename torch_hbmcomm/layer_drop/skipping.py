"""Keeps an optimizer from moving layers that were dropped: a zero gradient would let weight decay
and momentum do so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Skipping:
    """Hides the gradients of the parameters in `dropped` while an optimizer steps."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.dropped: Iterable[torch.Tensor] = ()
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._hide)
            optimizer.register_step_post_hook(self._show)

    def _hide(
        self, _: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if any(argument is not None for argument in (*arguments[1:], named.get("closure"))):
            raise ValueError(
                "skip_update=True has to know which layers were dropped before the optimizer "
                "steps: call backward() first, and step() without a closure"
            )
        for parameter in self.dropped:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _show(self, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
