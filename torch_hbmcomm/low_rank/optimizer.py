"""Optimizers under low-rank approximations: momentum is damped because gradients come late, and
Adam's second moment is corrected because gradients of several steps arrive together.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from torch_hbmcomm.low_rank.products import add_to_matrices, find_rights
from torch_hbmcomm.low_rank.ranks import Matrix, read_matrices, write_matrices
from torch_hbmcomm.optimizers import Optimizer, refuses, watch_steps
from torch_hbmcomm.tensors import gradient_strides, local_part, same_order


class MomentumDamper:
    """Removes a part of SGD's momentum along the directions that were sent, before each step.

    Momentum of delayed gradients would repeat a movement that newer gradients have corrected. This
    is the "momentum factor masking" of Lin et al. 2018 (*Deep Gradient Compression*), for
    directions instead of elements. Adam's first moment stays as it is.

    Args:
        part: the part of the momentum that is removed, in [0, 1]
        optimizers: the watched optimizers; None: all of this process
    """

    def __init__(self, part: float, optimizers: Collection[Optimizer] | None = None) -> None:
        self._part = part
        self._bases: dict[int, tuple[Matrix, torch.Tensor]] = {}  # by the parameter's id
        watch_steps(self, before=MomentumDamper._damp, optimizers=optimizers)

    def add(self, parameter: torch.Tensor, matrix: Matrix, basis: torch.Tensor) -> None:
        """Damp along `basis` in the parameter's next step. basis: orthonormal columns, each with as
        many elements as the matrix has rows."""
        if self._part > 0:
            self._bases[id(parameter)] = matrix, basis

    def clear(self) -> None:
        self._bases.clear()

    def _damp(self, optimizer: Optimizer, *_: Any) -> None:
        if refuses(optimizer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._bases:
                    continue
                momentum = _momentum(optimizer, parameter)
                if momentum is not None:
                    matrix, basis = self._bases.pop(id(parameter))
                    values = read_matrices([matrix], [momentum])
                    lefts = [basis.to(momentum.dtype).contiguous()]
                    rights = [momentum.new_empty(basis.shape[1], matrix.columns)]
                    find_rights(values, lefts, rights, 1.0)
                    add_to_matrices(values, lefts, rights, -self._part)
                    write_matrices([matrix], values, [momentum])


class SecondMomentCorrector:
    """Keeps Adam's second moment near its value without compression, before an optimizer steps.

    Gradients of several steps arrive as one sum. The square of the sum is usually larger than the
    sum of the gradients' squares, and Adam's steps would be too small. So only a part of the square
    of the sum counts. The corrected optimizers are those with two `betas` that keep the moment as
    `exp_avg_sq`, such as AdamW.

    optimizers: the watched optimizers; None: all of this process.
    """

    def __init__(self, optimizers: Collection[Optimizer] | None = None) -> None:
        self._parts: dict[int, float] = {}  # by the parameter's id
        watch_steps(self, before=SecondMomentCorrector._correct, optimizers=optimizers)

    def add(self, parameter: torch.Tensor, part: float) -> None:
        """Count only `part` of the squares of the parameter's gradient, in its next step.

        part: in (0, 1]
        """
        self._parts[id(parameter)] = part

    def clear(self) -> None:
        self._parts.clear()

    def _correct(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._parts or refuses(optimizer):
            return
        scale = getattr(optimizer, "grad_scale", None)  # set by a GradScaler for a fused optimizer
        unscale = 1.0 if scale is None else 1 / float(scale)
        for group in optimizer.param_groups:
            betas = group.get("betas", ())
            if len(betas) != 2 or float(betas[1]) == 0:
                continue
            # The optimizer's step multiplies the moment by betas[1], and adds (1 - betas[1]) times
            # the whole square. So the excess is subtracted now, divided by betas[1].
            weight = unscale**2 * (1 - float(betas[1])) / float(betas[1])
            for parameter in group["params"]:
                moment = optimizer.state.get(parameter, {}).get("exp_avg_sq")
                gradient = parameter.grad
                if moment is None or gradient is None:
                    continue
                part = self._parts.pop(id(parameter), 1.0)
                if part < 1:
                    moment, gradient = local_part(moment.detach()), local_part(gradient)
                    moment.addcmul_(gradient, gradient, value=(part - 1) * weight).clamp_(min=0)


def _momentum(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the momentum of this rank's part of a parameter, flat, in the memory order of the
    gradient. Returns None if the optimizer has no momentum of it, or has it in another order."""
    found = optimizer.state.get(parameter, {}).get("momentum_buffer")
    if not isinstance(found, torch.Tensor):
        return None
    found, parameter = local_part(found), local_part(parameter)
    if found.shape == parameter.shape and same_order(
        found.shape, found.stride(), gradient_strides(parameter)
    ):
        return found.detach().as_strided((found.numel(),), (1,))
    return None
