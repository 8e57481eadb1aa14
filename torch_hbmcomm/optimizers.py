"""Optimizers of a training script: hooks around their steps, and steps that the library makes."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Optimizer = torch.optim.Optimizer
T = TypeVar("T")
StepHook = Callable[[T, Optimizer, tuple[Any, ...], dict[str, Any]], None]


def watch_steps(
    owner: T,
    *,
    before: StepHook[T] | None = None,
    after: StepHook[T] | None = None,
    optimizers: Collection[Optimizer] | None = None,
) -> Callable[[], None]:
    """Call before(owner, optimizer, arguments, keywords) and after(...) around each step, until
    `owner` is garbage-collected. Returns a function that ends these calls earlier.

    torch.compile() never traces the hooks; it compiles only the rest of a step. A traced hook would
    keep the state of the step in which it was traced, and use this state in all later steps.

    Args:
        before, after: functions that take the owner, such as methods of its class
        optimizers: the optimizers whose steps are watched; None: every optimizer of the process
    """
    handles = []
    for function, register_for_all, method in (
        (before, register_optimizer_step_pre_hook, "register_step_pre_hook"),
        (after, register_optimizer_step_post_hook, "register_step_post_hook"),
    ):
        if function is not None:
            hook = _untraced(owner, function)
            registers: Iterable[Any] = [register_for_all]
            if optimizers is not None:
                registers = [getattr(optimizer, method) for optimizer in optimizers]
            handles += [register(hook) for register in registers]

    def end() -> None:
        for handle in handles:
            handle.remove()

    weakref.finalize(owner, end)
    return end


def optimizers_with(
    given: Optimizer | Sequence[Optimizer], parameters: Mapping[str, torch.Tensor], method: str
) -> Sequence[Optimizer]:
    """Return the given optimizers as a sequence.

    Args:
        parameters: parameters by name; each must be in one of the optimizers
        method: the call that takes the optimizers, for errors

    Raises:
        TypeError: one of them is not an optimizer
        ValueError: a parameter is missing
    """
    optimizers = given if isinstance(given, Sequence) else (given,)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is one or several, not {type(optimizer).__name__}")
    covered = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in covered]
    if missing:
        raise ValueError(
            f"{method}: no optimizer that was given has {', '.join(missing[:5])}: give all that "
            "step the model, in one list"
        )
    return optimizers


def optimizers_to_drain(
    given: Optimizer | Sequence[Optimizer], parameters: Mapping[str, torch.Tensor]
) -> Sequence[Optimizer]:
    """Return the optimizers whose steps apply the gradients that drain() gathers.

    Raises the errors of optimizers_with(), and ValueError if a step() needs a closure, because a
    closure would replace these gradients by others.
    """
    optimizers = optimizers_with(given, parameters, "drain()")
    for optimizer in optimizers:
        kind = type(optimizer)
        try:
            inspect.signature(kind.step).bind(optimizer)
        except TypeError:
            raise ValueError(
                f"drain(): {kind.__name__}.step() needs a closure, which computes other gradients "
                "than those that wait: give an optimizer without one, such as "
                "torch.optim.SGD(model.parameters(), lr=...)"
            ) from None
    return optimizers


def step_and_clear(optimizers: Sequence[Optimizer]) -> None:
    """Step each optimizer, then clear the gradients of all."""
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def steps_like(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Return True if the optimizer has the step() of `kind`, a class of torch's."""
    return isinstance(optimizer, kind) and (
        inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)
    )


def late_moves(momentum: float, ages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how SGD's momentum moves sums of gradients that came late.

    A sum of the gradients of k steps moves its parameters as if it had come whole in the first of
    these steps. Otherwise momentum would carry it on for as long again as it has waited, and
    training would oscillate.

    Args:
        ages: float64, the k of each sum

    Returns two tensors like ages. The first has the part of the sum that is in the momentum after
    the k steps. The second has the moves of the sum so far, as multiples of its first move.
    """
    left = momentum ** (ages - 1)
    moves = ages if momentum == 1 else (1 - momentum**ages) / (1 - momentum)
    return left, moves


def move_on(
    parameter: torch.Tensor,
    buffer: torch.Tensor,
    gradient: torch.Tensor,
    group: Mapping[str, Any],
    *,
    gain: float,
    left: torch.Tensor | float,
    moves: torch.Tensor | float,
) -> None:
    """Complete a step of torch's SGD with a late sum of gradients.

    Args:
        parameter, buffer: the parameter and its momentum after the step; both are changed
        gradient: the sum that the step took
        group: the optimizer's group of the parameter
        gain: the part of the gradient that the step added to the momentum, 1 - dampening or 1
        left, moves: as late_moves() returns them
    """
    factor = -gain if group["maximize"] else gain
    rate = float(group["lr"]) * (float(group["momentum"]) if group["nesterov"] else 1.0)
    buffer.sub_(gradient * (factor * (1 - left)))
    parameter.sub_(gradient * (factor * rate * (moves - 1)))


def refuses(optimizer: Optimizer) -> bool:
    """Return True if a fused optimizer skips its step, because its GradScaler found an infinity."""
    refused = getattr(optimizer, "found_inf", None)
    return refused is not None and bool(refused.item())


def has_closure(arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return True if the arguments of an optimizer's step, the optimizer first, have a closure."""
    return any(argument is not None for argument in (*arguments[1:], named.get("closure")))


def _untraced(owner: T, function: StepHook[T]) -> Any:
    """Return a hook that torch.compile() does not trace, and that holds only a weak reference to
    its owner."""
    found = weakref.ref(owner)

    def hook(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if (living := found()) is not None:
            function(living, optimizer, arguments, keywords)

    # torch.compiler.disable() imports the compiler, which takes a second. As a decorator in this
    # module it would do so when the module is imported. Here it costs nothing more, because every
    # optimizer's constructor imports the compiler too.
    return torch.compiler.disable(hook)
