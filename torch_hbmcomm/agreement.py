"""Collective attempts: one rank's bad argument is every rank's error, and the group continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def together(group: dist.ProcessGroup, attempt: Callable[[], T]) -> list[T]:
    """Call attempt() on every rank of the group, and return the results by rank. Collective.

    REQUIRES: attempt() does not communicate in `group`, and its results can be pickled.

    If attempt() raises on one rank, every rank raises: that rank its own exception, each other rank
    RuntimeError with the rank and its error's text. The group continues.
    """
    error: Exception | None = None
    outcome: tuple[T | None, str] = None, ""
    try:
        outcome = attempt(), ""
    except Exception as raised:
        error = raised
        outcome = None, f"{type(error).__name__}: {error}"
    told: list[tuple[T, str]] = [outcome] * dist.get_world_size(group)  # type: ignore[list-item]
    dist.all_gather_object(told, outcome, group=group)
    if error is not None:
        raise error
    for rank, (_, words) in enumerate(told):
        if words:
            raise RuntimeError(f"rank {rank} of the group cannot take part: {words}")
    return [result for result, _ in told]
