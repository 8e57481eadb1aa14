"""What a LayerDropState refuses, or warns of."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.layer_drop.bucket import Plan
from torch_hbmcomm.layer_drop.terms import LayerDrop

Optimizer = torch.optim.Optimizer


def group_of(
    model: DistributedDataParallel | None, group: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    """Raises TypeError and ValueError."""
    chosen = dist.group.WORLD if group is None else group
    if chosen is None:
        raise ValueError("there is no default group; call init_process_group first")
    if not isinstance(chosen, dist.ProcessGroup):
        raise TypeError(
            f"group is a process group that this rank is in, or None, not {type(chosen).__name__}"
        )
    if model is None:
        return chosen
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model is the DistributedDataParallel model, not {type(model).__name__}: wrap it first"
        )
    if model.process_group is not chosen:
        raise ValueError(
            "the group is not the model's: give DistributedDataParallel(process_group=...) and "
            "LayerDropState the same one"
        )
    if model._comm_hooks:
        hook, _ = model._comm_hooks[0]
        raise ValueError(
            f"the model has a communication hook ({hook.__qualname__}), and DDP takes only one"
        )
    return chosen


def enabled(scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """None for one that does nothing. Raises TypeError."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a torch.amp.GradScaler, not {type(scaler).__name__}")
    return scaler if scaler is not None and scaler.is_enabled() else None


def optimizers_of(
    given: Optimizer | Sequence[Optimizer] | None,
    skip_update: bool,
    parameters: Mapping[str, torch.Tensor],
) -> Sequence[Optimizer]:
    """Raises TypeError and ValueError."""
    if skip_update is not (given is not None):
        raise ValueError("skip_update=True and optimizer=... go together: the one needs the other")
    if given is None:
        return ()
    optimizers = given if isinstance(given, Sequence) else (given,)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is one or several, not {type(optimizer).__name__}")
    covered = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in covered]
    if missing:
        raise ValueError(
            f"skip_update=True: no optimizer that was given has {', '.join(missing[:5])}: give all "
            "that step the model, as optimizer=[...]"
        )
    return optimizers


def warn_if_little_can_be_dropped(terms: LayerDrop, plans: Sequence[Plan]) -> None:
    if terms.ratio == 0 or terms.fixed_threshold is not None:
        return
    layers = [layer for plan in plans for layer in plan.layers]
    always = sum(layer.numel for layer in layers if layer.always)
    total = sum(layer.numel for layer in layers)
    if always > (1 - terms.ratio) * total:
        warnings.warn(
            f"layers that are always sent are {always / total:.0%} of the model, and "
            f"ratio={terms.ratio} would send {1 - terms.ratio:.0%}: they have one dimension, or "
            f"fewer than min_numel={terms.min_numel} elements",
            RuntimeWarning,
            stacklevel=2,
        )


def warn_not_finite(plan: Plan, moments: Sequence[float]) -> None:
    broken = [
        layer.name
        for layer, moment in zip(plan.layers, moments, strict=True)
        if not math.isfinite(moment)
    ]
    if broken:
        warnings.warn(
            f"the accumulated gradient of {', '.join(broken)} is not finite; it was sent at once, "
            "and is in .grad on all ranks",
            RuntimeWarning,
            stacklevel=2,
        )
