"""Optimizers under error feedback: parameters that waited may skip the step (skip_update), and at
the end the optimizers apply the residuals (drain).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.residuals import Residuals
from torch_hbmcomm.optimizers import Optimizer, watch_steps


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
        if any(argument is not None for argument in (*arguments[1:], named.get("closure"))):
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


def move_to_gradients(
    residuals: Residuals, parameters: Mapping[str, torch.Tensor], averager: Averager
) -> None:
    """Average the residuals over the ranks into .grad, and clear the residuals. .grad is None if
    all elements of the mean are zero. All ranks call it.

    Raises OverflowError, on all ranks, if an average overflows its dtype; then nothing has changed.
    """
    held = residuals.state_dict(parameters)
    gradients = {}
    for name, parameter in parameters.items():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        total = torch.zeros_like(parameter, dtype=wide, requires_grad=False)
        if name in held:
            total.copy_(held[name])
        averager.start(averager.scaled(total)).wait()
        gradients[name] = total.to(parameter.dtype)
        if not gradients[name].isfinite().all():
            raise OverflowError(
                f"the residual of {name} is not finite as {parameter.dtype}: a smaller ratio "
                "lets less add up"
            )
    residuals.load_state_dict([], parameters)
    for name, parameter in parameters.items():
        parameter.grad = gradients[name] if gradients[name].any() else None
