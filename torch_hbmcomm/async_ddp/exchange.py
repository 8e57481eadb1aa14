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
from torch_hbmcomm.async_ddp.totals import PiecePlan, Totals
from torch_hbmcomm.parameter_server.exchange import Arrival
from torch_hbmcomm.pipeline import TaskPipeline
from torch_hbmcomm.tensors import is_finite

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BucketPlan:
    """The parameters of a bucket, in their order, and the pieces in which they travel."""

    layout: FlatLayout
    names: tuple[str, ...]
    pieces: Sequence[PiecePlan]

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
        self._twins: dict[tuple[str, ...], HostTwin] = {}  # of buckets on an accelerator

    def submit(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket; its future gets the bucket's buffer, filled by take()."""
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
            take = partial(totals.take, gradients, plan.pieces)
        else:
            promise = torch.futures.Future(devices=[gradients.device])
            twin = self._twin(plan, gradients)
            twin.fetch(gradients)
            push = partial(self._push, totals, twin.values, plan, twin.wait)
            take = partial(totals.take, twin.values, plan.pieces)
            give = partial(twin.giving, gradients)
        task = self._pipeline.submit(push, take)
        task.add_done_callback(partial(_keep, promise, gradients, give))
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
            self._plans[names] = BucketPlan(layout, names, self._totals[dtype].plan(names))
        return self._plans[names]

    def _twin(self, plan: BucketPlan, gradients: torch.Tensor) -> HostTwin:
        known = self._twins.get(plan.names)
        if known is None:
            for names in [each for each in self._twins if set(each) & set(plan.names)]:
                del self._twins[names]  # of buckets that DDP has built anew since
            known = self._twins[plan.names] = HostTwin(gradients)
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
        return totals.push(gradients, plan.pieces)


class HostTwin:
    """A bucket's gradients in the host's memory, pinned if it can be, for one of an accelerator.

    fetch() queues a copy from the device on the current stream, which wait() waits for, in the
    pipeline's thread. giving() queues the copy back on a stream of its own, current within it: a
    future that gets its result there lets whoever waits for it wait for the copy.
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
    """Return whether the host has pinned memory for the device, and say so once if it has not."""
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
    except Exception as failure:  # the device's: whoever waits has to hear of it
        if not promise.done():
            promise.set_exception(failure)
