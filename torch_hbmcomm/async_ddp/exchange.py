"""The exchange of a bucket of DDP's gradients, between backward() and the boxes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from torch_hbmcomm.async_ddp.layout import FlatLayout
from torch_hbmcomm.async_ddp.parameters import Flats, Parameters
from torch_hbmcomm.async_ddp.totals import ShardPlan, Totals
from torch_hbmcomm.parameter_server.exchange import Arrival
from torch_hbmcomm.pipeline import TaskPipeline
from torch_hbmcomm.tensors import is_finite

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BucketPlan:
    """The parameters of a bucket, in their order, and the shards in which they are sent."""

    layout: FlatLayout
    names: tuple[str, ...]
    shards: Sequence[ShardPlan]

    def clear_not_finite(self, gradients: torch.Tensor) -> list[str]:
        """Set the whole gradient of a parameter to zero if one of its elements is not finite.
        Returns the names of these parameters."""
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
            bounds = self.layout.ranges[name]
            count = bounds.stop - bounds.start
            yield gradients[at : at + count]
            at += count


class BucketExchange:
    """Adds the gradients of buckets to the totals, and fills the buckets from the totals. The
    pipeline's thread does both.

    Threads: only the training thread calls the methods.
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
        self._host_copies: dict[tuple[str, ...], HostCopy] = {}  # of buckets on an accelerator

    def submit(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket. The future gets the bucket's buffer once Totals.take()
        has filled it."""
        gradients = bucket.buffer()
        names = self._parameters.names(bucket.parameters())
        self._parameters.check_bucket(names, gradients, arranged_again=names not in self._plans)
        plan = self._plan(gradients.dtype, names)
        totals = self._totals[gradients.dtype]
        promise: torch.futures.Future[Any]
        give: Callable[[], AbstractContextManager[None]] = nullcontext
        if gradients.is_cpu:
            promise = torch.futures.Future()
            push = partial(self._push, totals, gradients, plan)
            take = partial(totals.take, gradients, plan.shards)
        else:
            promise = torch.futures.Future(devices=[gradients.device])
            host = self._host_copy(plan, gradients)
            host.fetch(gradients)
            push = partial(self._push, totals, host.values, plan, host.wait)
            take = partial(totals.take, host.values, plan.shards)
            give = partial(host.giving, gradients)
        task = self._pipeline.submit(push, take)
        task.add_done_callback(partial(_keep, promise, gradients, give))
        return promise.then(torch.futures.Future.value)  # so that DDP sees an exception

    def take_all(self) -> Flats:
        """Take all additions to the totals that this rank has not taken yet. Returns them, divided
        by the number of ranks. Waits."""

        def take() -> Flats:
            gradients = self._parameters.empty()
            for dtype, totals in self._totals.items():
                totals.take_all(gradients[dtype])
            return gradients

        return self._pipeline.call(take)

    def outstanding(self) -> Flats:
        """Return the same values as take_all(), in float64, without taking the additions. Waits."""
        return self._pipeline.call(
            lambda: {dtype: totals.outstanding() for dtype, totals in self._totals.items()}
        )

    def add_outstanding(self, outstanding: Flats) -> None:
        """Add `outstanding`, a result of outstanding(), to the first exchange of each parameter.

        Call it before the first bucket.
        """
        for dtype, totals in self._totals.items():
            totals.add_outstanding(outstanding[dtype])

    def _plan(self, dtype: torch.dtype, names: tuple[str, ...]) -> BucketPlan:
        if names not in self._plans:
            layout = self._parameters.layouts[dtype]
            self._plans[names] = BucketPlan(layout, names, self._totals[dtype].plan(names))
        return self._plans[names]

    def _host_copy(self, plan: BucketPlan, gradients: torch.Tensor) -> HostCopy:
        known = self._host_copies.get(plan.names)
        if known is None:
            for names in [each for each in self._host_copies if set(each) & set(plan.names)]:
                del self._host_copies[names]  # of buckets that DDP has rebuilt
            known = self._host_copies[plan.names] = HostCopy(gradients)
        return known

    def _push(
        self,
        totals: Totals,
        gradients: torch.Tensor,
        plan: BucketPlan,
        wait: Callable[[], None] = lambda: None,
    ) -> list[Arrival]:
        wait()
        if cleared := plan.clear_not_finite(gradients):
            self.refused += len(cleared)
            warnings.warn(
                f"rank {self._rank}: the gradient of {', '.join(cleared)} is not finite; it was "
                "not added to the totals, and what others have added is applied",
                RuntimeWarning,
                stacklevel=1,
            )
        return totals.push(gradients, plan.shards)


class HostCopy:
    """The host copy of a bucket on an accelerator, in pinned memory if the device has any.

    fetch() queues a copy from the device on the current stream; wait(), in the pipeline's thread,
    waits for that copy. giving() is for a with statement. It queues the copy to the device on a
    stream of this object, which is the current stream inside the block. So if a future is completed
    inside the block, its waiters wait for the copy to the device.
    """

    def __init__(self, gradients: torch.Tensor) -> None:
        pinned = _can_pin(gradients.device)
        self.values = torch.empty(gradients.shape, dtype=gradients.dtype, pin_memory=pinned)
        self._arrived = torch.Event(device=gradients.device, blocking=True)
        self._stream = torch.Stream(device=gradients.device)

    def fetch(self, gradients: torch.Tensor) -> None:
        self.values.copy_(gradients, non_blocking=True)
        self._arrived.record(torch.accelerator.current_stream(gradients.device))

    def wait(self) -> None:
        self._arrived.synchronize()

    @contextmanager
    def giving(self, gradients: torch.Tensor) -> Iterator[None]:
        with self._stream:
            gradients.record_stream(self._stream)
            gradients.copy_(self.values, non_blocking=True)
            yield


@cache
def _can_pin(device: torch.device) -> bool:
    """Return True if the host has pinned memory for the device; else log a warning once."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        _log.warning(
            "buckets on %s are copied by way of pageable memory, which is slower: the device has "
            "no pinned memory (%s)",
            device,
            str(error).splitlines()[0],
        )
        return False
    return True


def _keep(
    promise: torch.futures.Future[Any],
    value: torch.Tensor,
    giving: Callable[[], AbstractContextManager[None]],
    task: Future[None],
) -> None:
    error = task.exception()
    if error is not None:
        promise.set_exception(error)
        return
    try:
        with giving():
            promise.set_result(value)
    except Exception as failure:  # the device's error, for the future's waiters
        if not promise.done():
            promise.set_exception(failure)
