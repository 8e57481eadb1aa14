"""Optimizers under dropping: a dropped layer may skip their steps (skip_update), momentum is damped
where gradients come late, Adam's second moment is mended where several arrive together, and at the
end they apply what is still cached (drain).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from torch_hbmcomm.layer_drop.averaging import Averager
from torch_hbmcomm.layer_drop.cache import Cache
from torch_hbmcomm.layer_drop.products import add_to_matrices, find_rights
from torch_hbmcomm.layer_drop.ranks import Matrix, read_matrices, write_matrices
from torch_hbmcomm.optimizers import Optimizer, optimizers_with, watch_steps
from torch_hbmcomm.tensors import gradient_strides, same_order


class UpdateSkipper:
    """Hides the gradients of the parameters in `dropped` while an optimizer steps: with zeros,
    weight decay and momentum would move them.

    Args:
        optimizers: those that step the model, which are refused a closure; None: all that step
            in this process, but for steps with a closure, in which nothing is hidden
    """

    def __init__(self, optimizers: Collection[Optimizer] | None) -> None:
        self.dropped: list[torch.Tensor] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._found = optimizers is None
        watch_steps(
            self, before=UpdateSkipper._hide, after=UpdateSkipper._show, optimizers=optimizers
        )

    def _hide(self, _: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if any(argument is not None for argument in (*arguments[1:], named.get("closure"))):
            if self._found:
                return
            raise ValueError(
                "skip_update=True has to know which layers were dropped before the optimizer "
                "steps: call backward() first, and step() without a closure"
            )
        for parameter, gradient in self._hidden:  # by a step that raised
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


class MomentumDamper:
    """Takes a part of SGD's momentum away, before any optimizer of the process steps, along the
    directions in which something was sent: momentum of old gradients, which came late, would carry
    on what new ones have corrected (Lin et al. 2018, *Deep Gradient Compression*, "momentum factor
    masking", for directions in place of elements). Adam's first moment stays as it is.

    part: in [0, 1].
    """

    def __init__(self, part: float) -> None:
        self._part = part
        self._bases: dict[int, tuple[Matrix, torch.Tensor]] = {}  # by the parameter's id
        watch_steps(self, before=MomentumDamper._damp)

    def add(self, parameter: torch.Tensor, matrix: Matrix, basis: torch.Tensor) -> None:
        """Damp along an orthonormal basis, of columns as long as the matrix has rows, in the
        parameter's next step."""
        self._bases[id(parameter)] = matrix, basis

    def clear(self) -> None:
        self._bases.clear()

    def _damp(self, optimizer: Optimizer, *_: Any) -> None:
        if _refuses(optimizer):
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


class SecondMomentMender:
    """Keeps Adam's second moment near what it is without dropping, before any optimizer of the
    process steps.

    Where gradients of several steps arrive together, their square is larger than the sum of the
    gradients' squares, and Adam's steps would be too small. So a part of that square counts. What
    is mended is kept as `exp_avg_sq` by optimizers with two `betas`: Adam, AdamW and their like.
    """

    def __init__(self) -> None:
        self._parts: dict[int, float] = {}  # by the parameter's id
        watch_steps(self, before=SecondMomentMender._mend)

    def add(self, parameter: torch.Tensor, part: float) -> None:
        """Count a part, in (0, 1], of the squares of the parameter's gradient in its next step."""
        self._parts[id(parameter)] = part

    def clear(self) -> None:
        self._parts.clear()

    def _mend(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._parts or _refuses(optimizer):
            return
        scale = getattr(optimizer, "grad_scale", None)  # a GradScaler's, of a fused optimizer
        unscale = 1.0 if scale is None else 1 / float(scale)
        for group in optimizer.param_groups:
            betas = group.get("betas", ())
            if len(betas) != 2 or float(betas[1]) == 0:
                continue
            # The step keeps betas[1] of the moment, and adds (1 - betas[1]) of the whole square.
            weight = unscale**2 * (1 - float(betas[1])) / float(betas[1])
            for parameter in group["params"]:
                moment = optimizer.state.get(parameter, {}).get("exp_avg_sq")
                gradient = parameter.grad
                if moment is None or gradient is None:
                    continue
                part = self._parts.pop(id(parameter), 1.0)
                if part < 1:
                    moment = moment.detach()
                    moment.addcmul_(gradient, gradient, value=(part - 1) * weight).clamp_(min=0)


def _refuses(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer skips its step, as its GradScaler told it."""
    refused = getattr(optimizer, "found_inf", None)
    return refused is not None and bool(refused.item())


def _momentum(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's momentum, flat, in its gradient's memory order; None where there is
    none."""
    found = optimizer.state.get(parameter, {}).get("momentum_buffer")
    if (
        isinstance(found, torch.Tensor)
        and found.shape == parameter.shape
        and same_order(found.shape, found.stride(), gradient_strides(parameter))
    ):
        return found.detach().as_strided((found.numel(),), (1,))
    return None


def optimizers_of(
    given: Optimizer | Sequence[Optimizer] | None,
    skip_update: bool | None,
    parameters: Mapping[str, torch.Tensor],
) -> Sequence[Optimizer] | None:
    """Return the optimizers that were given for skip_update; None for none.

    Raises TypeError and ValueError unless they are given with skip_update=True alone, and have all
    parameters between them.
    """
    if (skip_update is True) is not (given is not None):
        raise ValueError("skip_update=True and optimizer=... go together: the one needs the other")
    if given is None:
        return None
    return optimizers_with(given, parameters, "skip_update=True")


def move_to_gradients(
    cache: Cache, parameters: Mapping[str, torch.Tensor], averager: Averager
) -> None:
    """Empty the cache into .grad: the mean over the ranks, or None for a parameter of which no rank
    has cached anything. All ranks call it.

    Raises OverflowError, on all ranks, for what a gradient cannot hold; then nothing has changed.
    """
    held = cache.state_dict(parameters)
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
                f"what is cached of {name} is not finite as {parameter.dtype}: a smaller max_age "
                "lets less add up"
            )
    cache.load_state_dict([], parameters)
    for name, parameter in parameters.items():
        parameter.grad = gradients[name] if gradients[name].any() else None
