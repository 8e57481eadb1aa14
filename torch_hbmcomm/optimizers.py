"""Optimizers of a training script, next to which the library works: hooks of their steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
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
    `owner` is garbage-collected. Returns a function that ends this earlier.

    torch.compile() never traces the hooks: of a compiled step only the rest is compiled. Traced,
    they would see the state of one step in all later ones.

    Args:
        before, after: functions that take the owner, such as methods of its class
        optimizers: None means every optimizer of the process
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


def _untraced(owner: T, function: StepHook[T]) -> Any:
    """Return a hook that holds no reference to its owner."""
    found = weakref.ref(owner)

    def hook(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if (living := found()) is not None:
            function(living, optimizer, arguments, keywords)

    # Not as a decorator of the function: torch.compiler.disable() imports the compiler, which
    # takes a second. An optimizer's constructor imports it, too.
    return torch.compiler.disable(hook)
