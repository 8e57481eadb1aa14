"""Averages over the ranks of the model's group: gradients, and numbers for encoders' decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_hbmcomm.groups import cpu_backend, form_group, is_hbm


class Averager:
    """Averages over the ranks of a group. All ranks make their Averager together.

    Gradients use the group itself. Decisions (agree()) use a second communicator of the same ranks,
    which lasts as long as the process's groups. If a decision used the group itself, it would wait
    until the previous bucket's gradients have been averaged, and nothing would overlap.

    Args:
        name: the second communicator's name, the same on every rank; no other group has it
        description: the second communicator's description, for errors

    last: the future of the last start(); None before the first.
    ranks: the number of ranks.

    Threads: one at a time, and on every rank the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, description: str) -> None:
        self._group = group
        self.ranks = group.size()
        self._is_hbm = is_hbm(group)
        self._decisions = _form_second_group(group, name, description)
        self.last: torch.futures.Future[Any] | None = None

    def agree(self, values: torch.Tensor) -> torch.Tensor:
        """Average the values of a decision, in place. Every rank gets the same bits. Waits."""
        dist.all_reduce(values, group=self._decisions)
        return values.div_(self.ranks)

    def start(
        self, gradients: torch.Tensor, on_decisions: bool = False
    ) -> torch.futures.Future[Any]:
        """Start to average, in place, gradients that the caller has multiplied by factor().
        Integers are added up.

        on_decisions: True: use the communicator of the decisions
        """
        op = dist.ReduceOp.AVG if self._divides(gradients.dtype) else dist.ReduceOp.SUM
        group = self._decisions if on_decisions else self._group
        work = dist.all_reduce(gradients, op, group=group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        self.last = future
        return future

    def factor(self, dtype: torch.dtype) -> float:
        """Return the factor for gradients before start(): 1, or 1 / ranks if start() sums."""
        return 1.0 if self._divides(dtype) else 1 / self.ranks

    def scaled(self, gradients: torch.Tensor) -> torch.Tensor:
        """Multiply gradients by factor(), in place, and return them."""
        factor = self.factor(gradients.dtype)
        return gradients if factor == 1 else gradients.mul_(factor)

    def _divides(self, dtype: torch.dtype) -> bool:
        """Return True if start() averages by ReduceOp.AVG, False if it sums.

        AVG is used with hbm only, because not every backend can average. Two-byte types and
        integers are always summed.
        """
        return self._is_hbm and dtype.is_floating_point and dtype.itemsize >= 4


def check_equal(settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError, which names the setting and the rank, if the settings of the ranks differ.

    settings: the settings of each rank, by rank. The hook's name comes first, because a rank with
    another hook may lack the other settings.
    """
    for rank, other in enumerate(settings):
        for name, value in settings[0].items():
            if other[name] != value:
                raise ValueError(
                    f"the state of the communication hook has {name}={value!r} on rank 0 and "
                    f"{name}={other[name]!r} on rank {rank}: it must be the same, because all "
                    "ranks send the same layers"
                )


def _form_second_group(group: dist.ProcessGroup, name: str, description: str) -> dist.ProcessGroup:
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
    """Return the group's options without its memory boxes; None if its backend is not hbm."""
    if not is_hbm(group):
        return None
    from torch_hbmcomm.backend import Options

    own = cpu_backend(group).options
    names = [name for name, value in vars(Options).items() if isinstance(value, property)]
    values = {name: getattr(own, name) for name in names}
    if own.memory == Options().memory:
        values["memory"] = None  # naming a policy would warn on a machine without HBM
    return Options(**values | {"parameter_server": ""})
