"""SGD's momentum for layers that reach the synchronous server late."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.optimizers import Optimizer, late_moves, move_on, steps_like

Arrived = tuple[torch.Tensor, Sequence[int]]
"""A parameter, and for each worker that sent it, the number of steps whose gradients it sent."""

_RISKY_RATIO = 0.9


def warn_of_loss(optimizer: Optimizer, drop: LayerDrop) -> None:
    """Warn that training may lose accuracy with SGD's momentum and a ratio of at least 0.9."""
    momentum = steps_like(optimizer, torch.optim.SGD) and any(
        group["momentum"] for group in optimizer.param_groups
    )
    if momentum and drop.fixed_threshold is None and drop.unsent >= _RISKY_RATIO:
        warnings.warn(
            f"training may lose accuracy: SyncParameterServer drops layers with ratio={drop.ratio}"
            ", and the optimizer has momentum. A convolutional net lost 1.4 points at R = 0.9, and "
            "7.0 at 0.95. ParameterServer lost 0.3 and 0.4",
            RuntimeWarning,
            stacklevel=3,
        )


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
