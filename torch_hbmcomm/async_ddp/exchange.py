"""The exchange of a bucket of DDP's gradients, between backward() and the boxes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from torch_hbmcomm import smb
from torch_hbmcomm.async_ddp.layout import BlockCyclicLayout, BucketPiece
from torch_hbmcomm.async_ddp.parameters import Flats, Parameters
from torch_hbmcomm.async_ddp.pipeline import TaskPipeline
from torch_hbmcomm.async_ddp.totals import Totals
from torch_hbmcomm.tensors import is_finite


@dataclass(frozen=True)
class BucketPlan:
    """The parameters of a bucket, in their order, and the pieces in which they travel."""

    layout: BlockCyclicLayout
    names: tuple[str, ...]
    pieces: Sequence[BucketPiece]

    def clear_not_finite(self, gradients: torch.Tensor) -> list[str]:
        """Set gradients that have an element which is not finite to zero; return their names."""
        cleared = []
        if not is_finite(gradients):
            for name, gradient in zip(self.names, self._gradients(gradients), strict=True):
                if not is_finite(gradient):
                    gradient.zero_()
                    cleared.append(name)
        return cleared

    def _gradients(self, gradients: torch.Tensor) -> Iterator[torch.Tensor]:
        at = 0
        for name in self.names:
            place = self.layout.ranges[name]
            count = place.stop - place.start
            yield gradients[at : at + count]
            at += count


class BucketExchange:
    """Carries buckets to the totals and back, in the pipeline's thread.

    Threads: one at a time, the one that trains.
    """

    def __init__(
        self,
        parameters: Parameters,
        totals: Mapping[torch.dtype, Totals],
        pipeline: TaskPipeline,
        rank: int,
    ) -> None:
        self.refused = 0  # gradients that were not finite
        self._parameters = parameters
        self._totals = totals
        self._pipeline = pipeline
        self._rank = rank
        self._plans: dict[tuple[str, ...], BucketPlan] = {}

    def submit(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket; its future gets the bucket's buffer, filled by take()."""
        gradients = bucket.buffer()
        plan = self._plan(gradients.dtype, self._parameters.names(bucket.parameters()))
        totals = self._totals[gradients.dtype]
        task = self._pipeline.submit(
            partial(self._push, totals, gradients, plan),
            partial(totals.take, gradients, plan.pieces),
        )
        promise: torch.futures.Future[Any] = torch.futures.Future()
        task.add_done_callback(partial(_keep, promise, gradients))
        return promise.then(torch.futures.Future.value)  # which raises, where DDP looks for it

    def take_all(self) -> Flats:
        """Take everything that was added and not taken yet. Waits."""

        def take() -> Flats:
            gradients = self._parameters.empty()
            for dtype, totals in self._totals.items():
                totals.take_all(gradients[dtype])
            return gradients

        return self._pipeline.call(take)

    def outstanding(self) -> Flats:
        """Return what take_all() would, but in float64, and leave it to be taken. Waits."""
        return self._pipeline.call(
            lambda: {dtype: totals.outstanding() for dtype, totals in self._totals.items()}
        )

    def add_outstanding(self, outstanding: Flats) -> None:
        """Add what outstanding() has returned to what is taken next; before the first bucket."""
        for dtype, totals in self._totals.items():
            totals.add_outstanding(outstanding[dtype])

    def _plan(self, dtype: torch.dtype, names: tuple[str, ...]) -> BucketPlan:
        if names not in self._plans:
            layout = self._parameters.layouts[dtype]
            self._plans[names] = BucketPlan(layout, names, layout.bucket(names))
        return self._plans[names]

    def _push(
        self, totals: Totals, gradients: torch.Tensor, plan: BucketPlan
    ) -> list[list[smb.Future]]:
        if cleared := plan.clear_not_finite(gradients):
            self.refused += len(cleared)
            warnings.warn(
                f"rank {self._rank}: the gradient of {', '.join(cleared)} is not finite; it was "
                "not added to the totals, and what others have added is applied",
                RuntimeWarning,
                stacklevel=1,
            )
        return totals.push(gradients, plan.pieces)


def _keep(promise: torch.futures.Future[Any], value: torch.Tensor, task: Future[None]) -> None:
    error = task.exception()
    if error is None:
        promise.set_result(value)
    else:
        promise.set_exception(error)
