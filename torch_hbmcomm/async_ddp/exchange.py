"""What happens to a bucket between backward() and the boxes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from torch_hbmcomm import smb
from torch_hbmcomm.async_ddp.bucket import Plan
from torch_hbmcomm.async_ddp.parameters import Flats, Parameters
from torch_hbmcomm.async_ddp.pipeline import Pipeline
from torch_hbmcomm.async_ddp.totals import Totals


class Exchange:
    """Carries buckets to the totals and back, in the pipeline's thread.

    Threads: one at a time, the one that trains.
    """

    def __init__(
        self,
        parameters: Parameters,
        totals: Mapping[torch.dtype, Totals],
        pipeline: Pipeline,
        rank: int,
    ) -> None:
        self.refused = 0  # gradients that were not finite
        self._parameters = parameters
        self._totals = totals
        self._pipeline = pipeline
        self._rank = rank
        self._plans: dict[tuple[str, ...], Plan] = {}

    def submit(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The future has the bucket's buffer, in which are the yields then."""
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
        """What was added and not yielded yet, as yields. Waits."""

        def take() -> Flats:
            gradients = self._parameters.empty()
            for dtype, totals in self._totals.items():
                totals.take_all(gradients[dtype])
            return gradients

        return self._pipeline.call(take)

    def outstanding(self) -> Flats:
        """As take_all(), but in float64, and left for the next yield. Waits."""
        return self._pipeline.call(
            lambda: {dtype: totals.outstanding() for dtype, totals in self._totals.items()}
        )

    def owe(self, outstanding: Flats) -> None:
        """The next yields have this besides; before the first bucket."""
        for dtype, totals in self._totals.items():
            totals.owe(outstanding[dtype])

    def _plan(self, dtype: torch.dtype, names: tuple[str, ...]) -> Plan:
        if names not in self._plans:
            space = self._parameters.spaces[dtype]
            self._plans[names] = Plan(space, names, space.bucket(names))
        return self._plans[names]

    def _push(self, totals: Totals, gradients: torch.Tensor, plan: Plan) -> list[list[smb.Future]]:
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
