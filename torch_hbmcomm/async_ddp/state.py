"""async_hook and its state, as a training script sees them.

DDP compares the hook's annotations with classes, so they must not be strings: this module has no
`from __future__ import annotations`.
"""

import secrets
import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import smb
from torch_hbmcomm.agreement import together
from torch_hbmcomm.async_ddp.agreement import AsyncHookConfig, check_equal, trained
from torch_hbmcomm.async_ddp.exchange import BucketExchange
from torch_hbmcomm.async_ddp.parameters import Parameters
from torch_hbmcomm.async_ddp.resync import Publication, Resync
from torch_hbmcomm.async_ddp.totals import Totals
from torch_hbmcomm.groups import HookState, group_of_model, group_to_report_in
from torch_hbmcomm.optimizers import optimizers_to_drain, step_and_clear
from torch_hbmcomm.parameter_server.membership import MembershipTable
from torch_hbmcomm.parameter_server.sharding import Boxes, JobSegments, connect_boxes
from torch_hbmcomm.pipeline import TaskPipeline
from torch_hbmcomm.smb.closeable import Closeable, close_at_exit


class AsyncState(HookState, Closeable):
    """The state of async_hook, which trains an unmodified DDP model asynchronously.

        ddp = DistributedDataParallel(model, process_group=group, broadcast_buffers=False)
        state = hbmcomm.AsyncState(group, ddp)  # on every rank of the group
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        ...  # the training loop as it was
        state.drain(optimizer)  # at the end: applies all remaining gradients
        state.close()

    The boxes hold the running total of each parameter's gradients. For each bucket the hook adds
    this rank's gradients to the totals. It returns the sum of all gradients that any rank has added
    since this rank's last exchange, divided by the group's size. So every rank applies every
    gradient exactly once, and in training no rank waits for another. (DDP itself makes all ranks
    wait for each other twice: in its constructor, and at the beginning of the second iteration, to
    arrange its buckets.) A background thread exchanges buckets with the boxes during backward().

    **Rules for the script**: apply the ``.grad`` of a backward() by one step of the optimizer
    before the model's next forward(), and clear it before the next backward(). To accumulate over
    several batches use ``ddp.no_sync()``. Ranks may run different numbers of iterations;
    ``ddp.join()`` is not needed, and refused.

    **Precision**: gradients are sent as float32 (float64 as float64, half types widened). Totals
    are float64. They are never set back to zero, because all ranks would have to agree on a time
    for that. If all gradients have the same magnitude g, an addition to a total of T gradients has
    an error of at most 2**-53 * T * g. After 10**9 additions this error is about as large as the
    rounding error of one gradient in float32. The error of rounding a result to the gradient's
    dtype is corrected in the next result.

    **Drift**: ranks apply the same gradients at different times and in different sums. Under plain
    SGD the replicas still agree to rounding once each has applied everything. Under other rules, or
    when the learning rate changes, they drift apart. papers/async_sgd/hook_drift.py measured the
    distances between replicas, relative to the weights' norm, with 4 ranks, a network of 577
    parameters and 600 steps. They were 8e-7 with SGD, 3e-4 with momentum, 5e-5 with weight decay
    and 3e-2 with Adam. When half of the ranks took half as many steps, the distances were, in the
    same order, 8e-7, 3e-3, 1e-1 and 3e-1.

    Every `resync_every` steps the source publishes a version: its parameters, and the totals that
    they include. The other ranks take a new version at the beginning of a step, without waiting.
    With resync_every=20 this kept Adam's replicas within 1e-2. A version is some steps old when a
    rank takes it, so versions increase the drift if there is hardly any. Each rank keeps its own
    buffers, such as BatchNorm's statistics.

    **Checkpoints**: one rank, the source, saves the state_dict() of the model, of the optimizer and
    of this state, after a step of its optimizer. To resume, every rank loads the same file; the
    number of ranks may change.

    **Deaths**: no rank waits for ranks that have died. Results are still divided by the group's
    size. After the source's death there are no new versions. If a box is out of reach for longer
    than the connection's reconnect_timeout, backward() raises RuntimeError with the box's error.
    After that the state can only be closed.

    The hook does not add a gradient that is not finite, but counts it (`refused`). A RuntimeWarning
    names the parameter, and the hook returns the other ranks' additions.

    Args:
        group: the model's group; None: the default group
        ddp: the model, with broadcast_buffers=False, no find_unused_parameters, and no other hook
        box: addresses or connections of the boxes, the same on every rank in the same order; None:
            the group's boxes (Options(parameter_server=...)). For each element of a parameter the
            boxes together hold 8 bytes, and 4 bytes for each rank (float64: 8 for each rank). With
            resync_every they hold 12 bytes more for each element (float64: 16). Each box has about
            an equal share.
        resync_every: steps of the source between two versions; only for parameters on the CPU.
            None: no versions.
        source: the rank, in the group, that publishes its parameters
        name: this job's name in the keys of its segments in the boxes
        timeout: seconds to wait for other ranks in drain()

    Raises:
        ValueError, TypeError: bad arguments, or a model that the hook does not support.
        RuntimeError: another rank's error.
        MemoryError: a box is too small
        smb.BoxError: an error of a box

    Threads: one at a time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ddp: DistributedDataParallel,
        box: Boxes | None = None,
        *,
        resync_every: int | None = None,
        source: int = 0,
        name: str = "async-hook",
        timeout: float = 300.0,
    ) -> None:
        # DDP's reducer holds the state where Python's garbage collector does not look. So a strong
        # reference to the model would keep the model and the state for ever.
        self._ddp = weakref.ref(ddp)
        self._group = group_to_report_in(group, ddp)
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._totals: dict[torch.dtype, Totals] = {}
        self._resync: Resync | None = None
        self._steps = self._barriers = 0
        self._unapplied = False  # .grad may have results that no step has applied
        self._closed = False
        self._came: set[int] = set()  # ids of the parameters in this backward()'s buckets so far
        with ExitStack() as resources:
            prepared = together(
                self._group,
                lambda: self._prepare(ddp, group, resync_every, source, box, name, resources),
            )
            check_equal([config for config, _ in prepared])
            config, job_name = prepared[0]
            together(self._group, lambda: self._attach(ddp, config, job_name, timeout, resources))
            self._resources = resources.pop_all()
        close_at_exit(self)

    # -- in training -----------------------------------------------------------------------------

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket, for async_hook."""
        if self._closed:
            raise RuntimeError("backward() of a model whose AsyncState was closed")
        ddp = self._ddp()
        if ddp is not None and ddp._join_config.enable:
            raise ValueError(
                "ddp.join() lets all ranks wait for each other in every iteration: leave it out, "
                "ranks that use async_hook may run different numbers of iterations"
            )
        future = self._exchange.submit(bucket)
        ids = {id(parameter) for parameter in bucket.parameters()}
        if not ids.isdisjoint(self._came):
            self._came.clear()  # the previous backward() did not end
        self._came |= ids
        # With static_graph=True, and several buckets, DDP marks no bucket of the first iteration as
        # the last.
        if bucket.is_last() or len(self._came) == len(self._parameters.named):
            self._came.clear()
            self._steps += 1
            self._unapplied = True
            if self._resync is not None:
                self._resync.end_backward()
        return future

    def drain(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        """Apply all unapplied gradients, by one more step of each optimizer, and clear the
        gradients.

        The optimizers must together have all parameters of the model. Every rank calls drain()
        after its last step, or all ranks between the same two epochs. No rank waits for ranks that
        have died or closed. With resync_every, all ranks then have the source's parameters. If the
        source has died or closed, they keep their own, and a RuntimeWarning says so.

        Raises:
            ValueError, TypeError: the optimizers lack a parameter, a step() needs a closure, or a
                parameter has another shape or memory order than at the start. Nothing has changed,
                and this rank may call again while others wait for it
            TimeoutError: another rank did not come; the error names it
            Exception: an error of an optimizer's step
        """
        optimizers = optimizers_to_drain(optimizer, self._parameters.named)
        self._parameters.check_orders()
        if self._resync is not None:
            self._resync.settle()
        self._barrier()
        self._parameters.set_gradients(self._exchange.take_all())
        step_and_clear(optimizers)
        self._unapplied = False
        if self._resync is not None:
            self._resync.align()
            self._barrier()
            if not self._resync.take():
                warnings.warn(
                    f"rank {self._rank}: the source has died or closed, so there is no version to "
                    "take; this rank keeps its own parameters",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._barrier()

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and, for each parameter, the additions that this rank has not applied
        yet, divided by the number of ranks, in float64. Call it between two iterations."""
        return {
            "outstanding": self._parameters.by_name(self._exchange.outstanding()),
            "steps": self._steps,
            "refused": self.refused,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint, on every rank from the same file, before the first backward().

        The hook's first result includes the outstanding additions. Raises ValueError for the state
        of another model, or an incomplete state, and RuntimeError after a backward(). If it raises,
        it has changed nothing.
        """
        if self._steps:
            raise RuntimeError("a checkpoint is loaded before the first backward()")
        if missing := {"outstanding", "steps", "refused"} - set(state):
            raise ValueError(
                f"the state lacks {', '.join(sorted(missing))}: load the result of state_dict()"
            )
        steps, refused = int(state["steps"]), int(state["refused"])
        self._exchange.add_outstanding(self._parameters.flattened(state["outstanding"]))
        self._steps, self._exchange.refused = steps, refused

    @property
    def refused(self) -> int:
        """The number of gradients that were not finite."""
        return self._exchange.refused

    def stats(self) -> dict[str, int]:
        """Return counters: steps (backward() passes with an exchange), refused (gradients that were
        not finite), resyncs (the source's versions that this rank took), pushed_bytes and
        pulled_bytes."""
        return {
            "steps": self._steps,
            "refused": self.refused,
            "resyncs": 0 if self._resync is None else self._resync.count,
            "pushed_bytes": sum(totals.pushed_bytes for totals in self._totals.values()),
            "pulled_bytes": sum(totals.pulled_bytes for totals in self._totals.values()),
        }

    def close(self) -> None:
        """Leave the boxes. The model keeps its values, and cannot be trained with the hook any
        more. Does nothing the second time."""
        self._closed = True
        self._resources.close()

    # -- inside ----------------------------------------------------------------------------------

    def _prepare(
        self,
        ddp: DistributedDataParallel,
        group: dist.ProcessGroup | None,
        resync_every: int | None,
        source: int,
        box: Boxes | None,
        name: str,
        resources: ExitStack,
    ) -> tuple[AsyncHookConfig, str]:
        """Check the arguments, and connect to the boxes.

        Returns the settings that must be equal on all ranks, and a unique job name.
        """
        group_of_model(ddp, group, "AsyncState")
        named = trained(ddp)
        devices = {parameter.device for parameter in named.values() if not parameter.is_cpu}
        if resync_every is not None and devices:
            raise ValueError(
                f"resync_every with parameters on {', '.join(map(str, devices))}: another thread "
                "reads versions, outside the training thread's streams; leave it out, or train on "
                "the CPU"
            )
        self._boxes = smb.all_of(self._group) if box is None else connect_boxes(box, resources)
        self._parameters = Parameters(named, len(self._boxes))
        config = AsyncHookConfig(resync_every, source, len(self._boxes))
        config.check(self._ranks)
        return config, f"{name}/{secrets.token_hex(8)}"

    def _attach(
        self,
        ddp: DistributedDataParallel,
        config: AsyncHookConfig,
        name: str,
        timeout: float,
        resources: ExitStack,
    ) -> None:
        """Attach to the job's segments, and enter its membership table. Closing `resources` undoes
        both."""
        parameters, totals = self._parameters, self._totals
        every = config.resync_every
        needs = parameters.bytes(published=every is not None)
        segments = JobSegments(self._boxes, name, *needs)
        resources.callback(segments.free)
        for dtype, layout in parameters.layouts.items():
            totals[dtype] = Totals(segments, layout, dtype, self._ranks)
        with segments.naming_needs(0):
            self._membership = MembershipTable(self._boxes[0], name, timeout, temporary=True)
        resources.callback(lambda: None if segments.ended else self._membership.leave())
        self._membership.activate()
        pipeline = TaskPipeline("hbm-async-hook")
        resources.callback(pipeline.close)
        self._exchange = BucketExchange(parameters, totals, pipeline, self._rank)
        if every is not None:
            publication = Publication(segments, parameters.layouts)
            gives = self._rank == config.source
            self._resync = Resync(publication, parameters, totals, pipeline, every, gives)
        for hook in (
            ddp.register_forward_pre_hook(self._begin_step),
            parameters.smallest.register_hook(self._check_cleared),
        ):
            resources.callback(hook.remove)

    def _begin_step(self, _module: nn.Module, _inputs: Any) -> None:
        """Take or give a version, before forward()."""
        if self._resync is not None and torch.is_grad_enabled():
            self._resync.begin_step(self._steps)

    def _check_cleared(self, _gradient: torch.Tensor) -> None:
        """Check that the smallest parameter's .grad was cleared. Called in backward(), before the
        gradient of this parameter is accumulated."""
        if self._unapplied:
            self._unapplied = False
            gradient = self._parameters.smallest.grad
            if gradient is not None and gradient.any():
                raise RuntimeError(
                    "the gradients of the last backward() are still in .grad, and would be added "
                    "to the totals again: between two backward(), call optimizer.step() and "
                    "optimizer.zero_grad(), or accumulate under ddp.no_sync()"
                )

    def _barrier(self) -> None:
        """Wait for all ranks that have neither died nor closed."""
        self._barriers += 1
        self._membership.set_pushed(self._barriers)
        self._membership.wait_pushed(self._barriers)


def async_hook(state: AsyncState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket as AsyncState says. Register it with ``ddp.register_comm_hook(state,
    async_hook)``."""
    return state.exchange(bucket)
