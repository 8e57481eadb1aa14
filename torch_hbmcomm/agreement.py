"""Raises an error of one rank, such as a bad argument, on every rank. The group stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def together(
    group: dist.ProcessGroup, attempt: Callable[[], T], caller: str = "something else"
) -> list[T]:
    """Call attempt() on every rank of the group, and return the results by rank. Collective.

    REQUIRES: attempt() does not communicate in `group`, except if it then raises on all ranks or on
    none; and its results can be pickled.

    If attempt() raises on one rank, that rank raises its own exception. Each other rank raises
    RuntimeError with the number of that rank and the exception's text. The group stays usable.

    caller: the name of the object that all ranks make. If the names differ, every rank raises
    ValueError.
    """
    error: Exception | None = None
    own: tuple[str, T | None, str]
    try:
        own = caller, attempt(), ""
    except Exception as raised:
        error = raised
        own = caller, None, f"{type(error).__name__}: {error}"
    ranks = dist.get_world_size(group)
    outcomes: list[tuple[str, T, str]] = [own] * ranks  # type: ignore[list-item]
    dist.all_gather_object(outcomes, own, group=group)
    for rank, (other, _, _) in enumerate(outcomes):
        if other != outcomes[0][0]:
            raise ValueError(
                f"rank 0 of the group makes {outcomes[0][0]}, and rank {rank} makes {other}: all "
                "ranks of a group make the same"
            ) from error
    if error is not None:
        raise error
    for rank, (_, _, words) in enumerate(outcomes):
        if words:
            raise RuntimeError(f"rank {rank} of the group cannot take part: {words}")
    return [result for _, result, _ in outcomes]
