"""Optimizers under error feedback: parameters that waited may skip the step (skip_update), and at
the end the optimizers apply the residuals (drain).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.residuals import Residuals
from torch_hbmcomm.optimizers import Optimizer, has_closure, watch_steps
from torch_hbmcomm.tensors import local_part


class UpdateSkipper:
    """Hides the gradients of the parameters in `dropped` while an optimizer steps. If it showed
    zeros instead, weight decay and momentum would change these parameters.

    Args:
        optimizers: the optimizers of the model; a step(closure) of them raises ValueError. None:
            all optimizers of this process; a step(closure) of them runs, and hides nothing
    """

    def __init__(self, optimizers: Collection[Optimizer] | None) -> None:
        self.dropped: list[torch.Tensor] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._found = optimizers is None
        watch_steps(
            self, before=UpdateSkipper._hide, after=UpdateSkipper._show, optimizers=optimizers
        )

    def clear(self) -> None:
        self.dropped.clear()

    def _hide(self, _: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if has_closure(arguments, named):
            if self._found:
                return
            raise ValueError(
                "skip_update has to know which layers were dropped before the optimizer steps: "
                "call backward() first, and step() without a closure"
            )
        for parameter, gradient in self._hidden:  # hidden by a step that raised
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden.clear()
        for parameter in self.dropped:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _show(self, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()


def average_residuals(
    residuals: Residuals, parts: Mapping[str, torch.Tensor], averager: Averager
) -> dict[str, torch.Tensor]:
    """Return the averages of the residuals over the ranks, by name. All ranks call it.

    parts: this rank's part of each parameter

    Raises OverflowError, on all ranks that average, if an average overflows its dtype.
    """
    held = residuals.state_dict(parts)
    averages = {}
    for name, part in parts.items():
        wide = torch.promote_types(part.dtype, torch.float32)
        total = torch.zeros_like(part, dtype=wide, requires_grad=False)
        if name in held:
            total.copy_(held[name])
        averager.start(averager.scaled(total)).wait()
        averages[name] = total.to(part.dtype)
        if not averages[name].isfinite().all():
            raise OverflowError(
                f"the residual of {name} is not finite as {part.dtype}: a smaller ratio lets less "
                "add up"
            )
    return averages


def set_gradients(
    parameters: Mapping[str, torch.Tensor], averages: Mapping[str, torch.Tensor]
) -> None:
    """Put the average of each parameter's part into .grad, or None if all elements are zero."""
    for name, parameter in parameters.items():
        parameter.grad = None
        if averages[name].any():
            gradient = torch.zeros_like(parameter, requires_grad=False)
            local_part(gradient).copy_(averages[name])
            parameter.grad = gradient
