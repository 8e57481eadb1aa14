"""The running totals of gradients, and the part of them that this worker has applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_hbmcomm.async_ddp.layout import LONGEST_RUN, FlatLayout, Run
from torch_hbmcomm.parameter_server.exchange import Arrival, Exchange
from torch_hbmcomm.parameter_server.layout import Shard
from torch_hbmcomm.parameter_server.sharding import JobSegments, ShardedValues

_SCALES = {"parameter": 1.0}


@dataclass(frozen=True)
class ShardPlan:
    """A shard of a bucket, its delta buffer, and the memory where its totals arrive."""

    shard: Shard
    delta: torch.Tensor
    fresh: torch.Tensor
    runs: Sequence[Run]


class Totals:
    """The totals of the gradients of one dtype; half types are sent as float32.

    push() adds this worker's gradients to the totals in the boxes. take() puts into the bucket the
    sum of all additions since this worker's last take(), divided by `workers`. It also adds
    `workers` times the rounded values of the bucket to `applied`, so the next take() corrects the
    rounding errors.

    Threads: one at a time.
    """

    def __init__(
        self, segments: JobSegments, layout: FlatLayout, dtype: torch.dtype, workers: int
    ) -> None:
        self.applied = torch.zeros(layout.count, dtype=torch.float64)
        self._layout = layout
        self._workers = workers
        self._scratch = torch.empty(min(LONGEST_RUN, layout.count), dtype=torch.float64)
        self._bounds = torch.finfo(dtype)
        self._values = ShardedValues(segments, layout.totals, f"totals/{dtype}")
        self._exchange = Exchange(segments, self._values)

    @property
    def pushed_bytes(self) -> int:
        return self._exchange.pushed_bytes

    @property
    def pulled_bytes(self) -> int:
        return self._exchange.pulled_bytes

    def plan(self, names: Sequence[str]) -> list[ShardPlan]:
        """Plan a bucket with these parameters in this order, for push() and take()."""
        return [
            ShardPlan(
                shard,
                _tensor(self._exchange.delta_buffer(shard), shard.delta_dtype),
                _tensor(*self._exchange.fresh(shard)),
                runs,
            )
            for shard, runs in self._layout.bucket(names)
        ]

    def push(self, gradients: torch.Tensor, plan: Sequence[ShardPlan]) -> list[Arrival]:
        """Start to add a bucket's gradients, and to fetch the totals. Returns the arrivals that
        take() waits for."""
        return self._exchange.add(_filled(gradients, plan), _SCALES, fetch=True)

    def take(
        self, gradients: torch.Tensor, plan: Sequence[ShardPlan], arrivals: Sequence[Arrival]
    ) -> None:
        """Fill the bucket shard by shard. Waits until each shard has arrived."""
        for each, arrival in zip(plan, arrivals, strict=True):
            arrival.wait()
            for run in each.runs:
                self._take_run(
                    each.fresh[run.inside : run.inside + run.count],
                    self.applied[run.begin : run.begin + run.count],
                    gradients[run.at : run.at + run.count],
                )

    def take_all(self, gradients: torch.Tensor) -> None:
        """Fill `gradients`, a flat tensor. Waits."""
        plan = self.plan(list(self._layout.ranges))
        self.take(gradients, plan, self._exchange.fetch(each.shard for each in plan))

    def outstanding(self) -> torch.Tensor:
        """Return all additions that this worker has not applied, divided by the number of workers:
        a flat tensor of float64."""
        return self._layout.read(self._values).sub_(self.applied).div_(self._workers)

    def add_outstanding(self, outstanding: torch.Tensor) -> None:
        """Add `outstanding`, a result of outstanding(), to the results of the next take()."""
        self.applied.sub_(outstanding, alpha=self._workers)

    def _take_run(
        self, totals: torch.Tensor, applied: torch.Tensor, gradients: torch.Tensor
    ) -> None:
        mean = torch.sub(totals, applied, out=self._scratch[: len(totals)]).div_(self._workers)
        gradients.copy_(mean.clamp_(self._bounds.min, self._bounds.max))
        applied.add_(gradients, alpha=self._workers)


def _filled(gradients: torch.Tensor, plan: Sequence[ShardPlan]) -> Iterator[Shard]:
    """Copy each shard's gradients into its delta buffer, then yield the shard."""
    for each in plan:
        for run in each.runs:
            target = each.delta[run.inside : run.inside + run.count]
            target.copy_(gradients[run.at : run.at + run.count])
        yield each.shard


def _tensor(memory: memoryview, dtype: str) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=getattr(torch, dtype))
