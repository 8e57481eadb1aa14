"""Averages over the ranks of the model's group: gradients, and the moments that decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_hbmcomm.groups import cpu_backend, form_group, is_hbm


class Averager:
    """Averages over the ranks of a group, all of which make one together.

    Gradients travel in the group itself. Decisions have a communicator of their own, which ends
    with the process's groups: behind the survivors of the bucket before, they would wait for them,
    and nothing would overlap.

    Args:
        name: the communicator's, the same on every rank; no other group has it
        description: of the communicator

    Threads: one at a time, and on every rank the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, description: str) -> None:
        self._group = group
        self._ranks = group.size()
        self._is_hbm = is_hbm(group)
        self._decisions = _beside(group, name, description)

    def agree(self, values: torch.Tensor) -> torch.Tensor:
        """Average values that decide, in place and at once; the same bits on every rank."""
        dist.all_reduce(values, group=self._decisions)
        return values.div_(self._ranks)

    def start(self, gradients: torch.Tensor, beside: bool = False) -> torch.futures.Future[Any]:
        """Start to average gradients, in place, which the caller has multiplied by factor().

        beside: on the communicator of the decisions
        """
        op = dist.ReduceOp.AVG if self._divides(gradients.dtype) else dist.ReduceOp.SUM
        group = self._decisions if beside else self._group
        work = dist.all_reduce(gradients, op, group=group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future

    def factor(self, dtype: torch.dtype) -> float:
        """Return what gradients are multiplied by before start(): 1, or 1 / ranks where it sums."""
        return 1.0 if self._divides(dtype) else 1 / self._ranks

    def scaled(self, gradients: torch.Tensor) -> torch.Tensor:
        """Multiply by factor(), in place."""
        factor = self.factor(gradients.dtype)
        return gradients if factor == 1 else gradients.mul_(factor)

    def _divides(self, dtype: torch.dtype) -> bool:
        """Return whether the group averages: not every backend can, and between nodes hbm does it
        on one rank alone for types of two bytes."""
        return self._is_hbm and dtype.itemsize >= 4


def check_equal(settings: Sequence[Mapping[str, Any]]) -> None:
    """Compare the settings of all ranks, given by rank. Raises ValueError if they differ, naming
    which and where. The first setting is the hook, which decides which others there are."""
    for rank, other in enumerate(settings):
        for name, value in settings[0].items():
            if other[name] != value:
                raise ValueError(
                    f"the state of the communication hook has {name}={value!r} on rank 0 and "
                    f"{name}={other[name]!r} on rank {rank}: all ranks choose alike what they "
                    "send, so it must be the same"
                )


def _beside(group: dist.ProcessGroup, name: str, description: str) -> dist.ProcessGroup:
    """Form another group of the same ranks."""
    backend = cpu_backend(group)
    return form_group(
        dist.get_process_group_ranks(group),
        name,
        backend.name(),
        backend.options._timeout,
        _options(group),
        description,
    )


def _options(group: dist.ProcessGroup) -> Any:
    """Return the group's options without its memory boxes; None unless it is hbm's."""
    if not is_hbm(group):
        return None
    from torch_hbmcomm.backend import Options

    own = cpu_backend(group).options
    names = [name for name, value in vars(Options).items() if isinstance(value, property)]
    values = {name: getattr(own, name) for name in names}
    if own.memory == Options().memory:
        values["memory"] = None  # a named policy is warned about if there is no HBM for it
    return Options(**values | {"parameter_server": ""})
