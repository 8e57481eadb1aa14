"""SGD's momentum for gradients that reach the synchronous server late.

A layer that waited brings the sum of k gradients at once. Momentum then moves it for as long again
as it has waited, and training oscillates. So the layer moves as if the whole sum had arrived in the
first of the k steps: by all moves that momentum would have made since then. The momentum that would
be left of the sum stays. As without waiting, a gradient moves the layer by 1 / (1 - momentum) times
the learning rate in the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_hbmcomm.optimizers import Optimizer, steps_like

Arrived = tuple[torch.Tensor, Sequence[int]]
"""A parameter, and for each worker that sent it, the number of steps whose gradients it sent."""


@contextmanager
def late_momentum(optimizer: Optimizer, arrived: Iterable[Arrived]) -> Iterator[None]:
    """Step the optimizer inside. Then the late parameters move on as this module describes.

    If workers waited for different times, the moves and the momentum are the means of theirs. Only
    torch's SGD is adapted; other optimizers step as always.
    """
    late = {id(parameter): ages for parameter, ages in arrived if max(ages) > 1}
    if not (late and steps_like(optimizer, torch.optim.SGD)):
        yield
        return
    state = optimizer.state.items()
    held = {id(one) for one, held in state if held.get("momentum_buffer") is not None}
    yield
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                if id(parameter) in late and parameter.grad is not None:
                    # SGD does not damp the gradient that begins the momentum.
                    gain = 1 - group["dampening"] if id(parameter) in held else 1.0
                    buffer = optimizer.state[parameter]["momentum_buffer"]
                    _move_on(parameter, buffer, group, gain, late[id(parameter)])


def _move_on(
    parameter: torch.Tensor,
    buffer: torch.Tensor,
    group: dict[str, float],
    gain: float,
    ages: Sequence[int],
) -> None:
    """Complete the step that SGD has made with parameter.grad. gain: the part of the gradient that
    SGD added to the momentum"""
    momentum = float(group["momentum"])
    left = statistics.fmean(momentum ** (age - 1) for age in ages)
    moves = statistics.fmean(sum(momentum**step for step in range(age)) for age in ages)
    rate = float(group["lr"]) * (momentum if group["nesterov"] else 1)
    sign = -1 if group["maximize"] else 1
    gradient = parameter.grad
    assert gradient is not None
    buffer.sub_(gradient, alpha=sign * gain * (1 - left))
    parameter.sub_(gradient, alpha=sign * gain * rate * (moves - 1))
