"""SGD's momentum for layers that reach the synchronous server late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_hbmcomm.optimizers import Optimizer, late_moves, move_on, steps_like

Arrived = tuple[torch.Tensor, Sequence[int]]
"""A parameter, and for each worker that sent it, the number of steps whose gradients it sent."""


@contextmanager
def late_momentum(optimizer: Optimizer, arrived: Iterable[Arrived]) -> Iterator[None]:
    """Step the optimizer inside. Afterwards late parameters move on (late_moves()).

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
                    ages = torch.tensor(late[id(parameter)], dtype=torch.float64)
                    left, moves = late_moves(float(group["momentum"]), ages)
                    move_on(
                        parameter,
                        optimizer.state[parameter]["momentum_buffer"],
                        parameter.grad,
                        group,
                        # SGD does not damp the gradient that begins the momentum.
                        gain=1 - group["dampening"] if id(parameter) in held else 1.0,
                        left=float(left.mean()),
                        moves=float(moves.mean()),
                    )
