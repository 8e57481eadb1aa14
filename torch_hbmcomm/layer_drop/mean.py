"""The mean over a group's ranks, in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Mean:
    """What is given to start() has been multiplied by factor(): not every backend divides, and hbm
    divides half types by one rank alone between nodes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._divides = group._get_backend(torch.device("cpu")).name() == "hbm"

    def factor(self, dtype: torch.dtype) -> float:
        return 1.0 if self._averages(dtype) else 1 / self._group.size()

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """In place."""
        factor = self.factor(values.dtype)
        return values if factor == 1 else values.mul_(factor)

    def start(self, values: torch.Tensor) -> torch.futures.Future[Any]:
        op = dist.ReduceOp.AVG if self._averages(values.dtype) else dist.ReduceOp.SUM
        work = dist.all_reduce(values, op, group=self._group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future

    def _averages(self, dtype: torch.dtype) -> bool:
        return self._divides and dtype.itemsize >= 4
