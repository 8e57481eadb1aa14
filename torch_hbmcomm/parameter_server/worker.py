"""One worker of a job: its exchanges with the weights in the boxes.

Ahn et al. 2018, section IV, has two scenarios. In the sequential one an exchange follows the
computation. In the parallel one a thread runs the exchange during the next step's computation, so
an iteration takes max(T_comp, T_comm) (equation 1).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.config import AsyncConfig
from torch_hbmcomm.parameter_server.exchange import Arrival, BoundedExchange, Scales
from torch_hbmcomm.parameter_server.job import AsyncJob
from torch_hbmcomm.parameter_server.layout import Layout, Shard, lay_out
from torch_hbmcomm.parameter_server.membership import WorkerEntry
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.replica import Model, Replica, model_tensors
from torch_hbmcomm.parameter_server.selection import AsyncLayerDrop, Selection, SendAll, layers_in
from torch_hbmcomm.parameter_server.shared_model import SharedModel
from torch_hbmcomm.pipeline import TaskPipeline
from torch_hbmcomm.tensors import check_fills_memory

_log = logging.getLogger(__name__)


class Call(Enum):
    """The calls that a worker takes part in, by the names of ParameterServer's methods."""

    STEP = "step()"
    PULL = "pull()"
    SAVE = "state_dict()"
    LOAD = "load_state_dict()"
    WAIT = "finish(wait=True)"
    FINISH = "finish()"
    CLOSE = "close()"


SENDING = (Call.STEP, Call.PULL, Call.SAVE, Call.FINISH, Call.CLOSE)  # send unsent changes


@dataclass(frozen=True)
class Plan:
    """The layout of a model, which every worker of a job makes alike.

    model: this process's model
    layers: the number of layers with a version counter; 0: no layer is dropped
    """

    model: SharedModel
    layout: Layout
    selection: Selection
    layers: int

    @staticmethod
    def of(
        model: nn.Module, optimizer: torch.optim.Optimizer, config: AsyncConfig, boxes: int
    ) -> Plan:
        """Lay the model's tensors out. Raises the errors of check_fills_memory(), model_tensors()
        and lay_out().

        boxes: the number of boxes
        """
        tensors = model_tensors(model, config.buffers == "shared")
        for name, tensor, kind in tensors:
            check_fills_memory(kind, name, tensor)
        specs = [TensorSpec.of(*one) for one in tensors]
        shared = SharedModel(model, optimizer, specs)
        if config.drop is None:
            layout = lay_out(specs, boxes, config.transfer_name)
            return Plan(shared, layout, SendAll(layout.changing), 0)
        layers = layers_in(specs, config.transfer_name, config.drop)
        members = [layer.members for layer in layers]
        layout = lay_out(specs, boxes, config.transfer_name, members)
        selection = AsyncLayerDrop(config.drop, layers, layout.changing)
        return Plan(shared, layout, selection, len(layers))


@dataclass(frozen=True)
class Exchanged:
    """The result of an exchange in the pipeline's thread.

    arrived: the shards whose fresh weights have arrived
    active: the active workers at the end of the exchange; None: the table was not read
    """

    arrived: Sequence[Shard]
    active: list[WorkerEntry] | None = None


class AsyncWorker:
    """Joins a job, takes its weights, and exchanges deltas for fresh weights until close().

    With overlap and push_every=1 a step makes no request in the caller's thread. The thread of the
    exchange reads the membership table, after it has sent the deltas, and while weights arrive.
    (With a bound on staleness, only the first shards are in flight then.) The next step counts the
    workers by this read. So its count is one exchange old, and only the rule gets this count:

    - A delta has the same scale in the model and in the boxes. The caller's thread computes the
      scale, moves the model by it, and passes it to the thread of the exchange.
    - The waits of a bound on staleness do not use the count. For each wait, BoundedExchange reads
      the table again, after the fence that the wait needs.

    With a larger push_every a count of the last exchange would be that many steps old. Then the
    caller's thread reads the table when an exchange begins, in a request that many steps share.

    Args:
        model: finds the tensors that this worker trains
        processes: the number of processes that train for this worker; rules scale deltas by the
            processes of all live workers

    Raises the errors of AsyncJob, TimeoutError, and smb.BoxError, which names the process of a
    group's box.

    Threads: one at a time. With overlap, a thread of its own runs the exchanges.
    """

    def __init__(
        self,
        boxes: Sequence[smb.Box],
        name: str,
        plan: Plan,
        config: AsyncConfig,
        model: Model,
        processes: int = 1,
    ) -> None:
        self._config = config
        self._layout = plan.layout
        self._selection = plan.selection
        self._kinds = {shard.kind for shard in self._layout.changing}
        self._pipeline: TaskPipeline | None = None
        self._in_flight: Future[Exchanged] | None = None  # the exchange during this step
        self._arrived: Sequence[Shard] = ()  # shards that the last exchange fetched, unapplied
        self._pending = False  # True: the model has unsent changes
        self._broken: str | None = None  # the tensor because of which act() refused an update
        with ExitStack() as resources:
            self._job = job = AsyncJob(boxes, name, plan.layout, config, plan.layers, processes)
            resources.callback(job.close)
            self._replica = Replica(model, job.exchange, config.rule)
            self._join()
            if config.overlap:
                self._pipeline = resources.enter_context(TaskPipeline("hbm-exchange"))
            self._resources = resources.pop_all()
        self._acts: dict[Call, Callable[[], None]] = {
            Call.STEP: self._exchange_now_or_overlapped,
            Call.PULL: self._pull,
            Call.SAVE: self._save,
            Call.LOAD: self._load,
            Call.WAIT: job.membership.wait_retired,
            Call.FINISH: self._finish,
            Call.CLOSE: self._send_all,
        }

    @property
    def index(self) -> int:
        """The worker's number in the job."""
        return self._job.membership.index

    @property
    def who(self) -> str:
        """The worker, for the warning of a refused update."""
        return f"worker {self.index}"

    def meet(self, call: Call, changed: bool) -> Call:
        """Begin a call. Returns the call to pass to act().

        changed: True: the model has changed since act() last sent its changes
        """
        self._pending |= changed
        return call

    def withdraw(self, call: Call, problem: Exception) -> None:
        """Do nothing: a worker of one process makes its calls alone."""

    def act(self, call: Call) -> str | None:
        """Do a worker's part of a call. Returns the name of a tensor if the update was refused,
        because an element is not finite, and the model has the boxes' weights instead."""
        self._broken = None
        with self._naming_process():
            self._acts[call]()
        return self._broken

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read the boxes' weights into tensors like the model's. Waits."""
        with self._naming_process():
            self._replica.read(tensors, self._layout.changing)

    def copy_model(self, into: Sequence[torch.Tensor], processes: int) -> None:
        """Copy the model for one of the worker's processes, to tensors of one dimension.

        The model has the sum of all processes' unsent changes. In the copy these changes are
        multiplied by the rule's scale for `processes` workers, divided by the rule's scale for one
        worker. So under a mean the copy has the mean of the processes' unsent changes.
        """
        rule = self._config.rule
        shares = {kind: rule.scale(kind, processes) / rule.scale(kind, 1) for kind in self._kinds}
        self._replica.copy_relative(into, shares)

    def counts(self) -> dict[str, int | float]:
        """Return the counts of ParameterServer.stats() that a worker has besides its bytes, as of
        the last exchange."""
        pushed = {entry.index: entry.pushed for entry in self._active}
        own = pushed.get(self.index, self._exchange.pushed)  # as old as the other clocks
        return {
            "workers": len(self._active),
            "ahead": max((own - clock for clock in pushed.values()), default=0),
            **self._selection.stats(),
        }

    def stats(self) -> dict[str, int | float]:
        """Return the present counts(), and the bytes."""
        self._active = self._job.membership.active()
        return {
            "pushed_bytes": self._exchange.pushed_bytes,
            "pulled_bytes": self._exchange.pulled_bytes,
            **self.counts(),
        }

    def abandon(self) -> None:
        """Do nothing: a worker of one process makes its calls alone."""

    def close(self) -> None:
        """Leave the job, without sending anything."""
        self._resources.close()

    # -- calls -----------------------------------------------------------------------------------

    def _exchange_now_or_overlapped(self) -> None:
        if self._pipeline is not None:
            self._exchange_during_next_step(self._pipeline)
        elif self._config.rule.reads_first:
            self._pull_then_push()
        else:
            self._push_and_pull()

    def _exchange_during_next_step(self, pipeline: TaskPipeline) -> None:
        """Apply the arrived weights, and start an exchange that runs during the next step.

        Waits for the last exchange first, because that exchange uses the delta buffers until it
        ends. With push_every=1 makes no request, unless an update is refused.
        """
        self.wait_for_exchange()
        workers, scales = self._scales() if self._counts_ahead else self._workers_and_scales()
        sent = self._fill_delta_buffers(workers)
        layers = {shard.layer for shard in sent}
        for shard in sent:
            self._replica.take_ahead(shard, scales[shard.kind])
        for shard in self._arrived:
            if shard.layer not in layers:
                self._replica.take_unsent(shard)
        self._in_flight = pipeline.submit(
            partial(self._exchange.start, sent, scales), partial(self._end_exchange, sent)
        )

    def _end_exchange(self, sent: Sequence[Shard], arrivals: Iterable[Arrival]) -> Exchanged:
        """Read the membership table for the next exchange while shards arrive, if that exchange
        follows in the next step. End the exchange. In the pipeline's thread."""
        active = self._job.membership.live() if self._counts_ahead else None
        return Exchanged(self._exchange.end(sent, arrivals), active)

    def _push_and_pull(self) -> None:
        """Exchange now, applying each shard while other shards are in flight."""
        workers, scales = self._workers_and_scales()
        sent = self._fill_delta_buffers(workers)
        layers = {shard.layer for shard in sent}
        for arrival in self._exchange.start(sent, scales):
            shard = arrival.wait()
            if shard.layer in layers:
                self._replica.take(shard)
            else:
                self._replica.take_unsent(shard)
        self._exchange.finish(sent)

    def _pull_then_push(self) -> None:
        """Exchange now, by a rule that computes deltas from fresh weights."""
        workers, scales = self._workers_and_scales()
        self._exchange.prefetch(self._layout.changing)
        sent = self._fill_delta_buffers(workers)
        for shard in sent:
            self._replica.take(shard)
        self._exchange.count_pull()
        self._exchange.push(sent, scales)

    def _pull(self) -> None:
        self._send_all()
        self._adopt(self._layout.changing)

    def _save(self) -> None:
        """Send all changes. Unless the rule reads first, put the boxes' weights into the model."""
        self._send_all()
        if not self._config.rule.reads_first:
            self._adopt(self._layout.changing)

    def _load(self) -> None:
        """Write the model to the boxes if this worker is the first to load, and training has not
        begun. Then take the boxes' weights."""
        membership = self._job.membership
        if membership.begun():
            _log.warning("training has begun in the box: its weights stay, not the checkpoint's")
        elif membership.claims_load():
            self._replica.give()
            membership.set_loaded()
        else:
            membership.wait_loaded()
        self._adopt(self._layout.shards)

    def _finish(self) -> None:
        self._send_all()
        self._job.membership.retire()

    # -- joining ---------------------------------------------------------------------------------

    def _join(self) -> None:
        """Take the job's weights, or write the first ones, and wait for the other workers.
        MembershipTable explains the order."""
        job, config, changing = self._job, self._config, self._layout.changing
        if job.leads:
            self._replica.give()
            job.publish()
        job.weights.check_mark(job.membership.ready())
        ahead = config.exchanges_ahead
        self._exchange = BoundedExchange(
            job.exchange, job.membership, changing, job.versions, ahead
        )
        self._replica.adopt(self._layout.constants)  # now, because no worker waits for this one yet
        self._exchange.count_from(job.membership.activate(math.inf if ahead is None else ahead))
        self._adopt(changing)
        self._active = job.membership.wait_for_workers(config.workers)

    # -- parts of an exchange --------------------------------------------------------------------

    @property
    def _counts_ahead(self) -> bool:
        """Return True if an overlapped exchange counts the workers for the next one."""
        return self._config.push_every == 1

    def wait_for_exchange(self) -> None:
        """Wait for the exchange in flight, if any; then self._arrived has its shards."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            exchanged = in_flight.result()
            self._arrived = exchanged.arrived
            if exchanged.active is not None:
                self._active = exchanged.active

    def _workers_and_scales(self) -> tuple[int, Scales]:
        """Read the membership table, and return the result of _scales(). Waits."""
        self._active = self._job.membership.live()
        return self._scales()

    def _scales(self) -> tuple[int, Scales]:
        """Return the number of processes of the workers believed alive, as of the last read of the
        membership table. Also return the scale of deltas for each kind of shard."""
        workers = max(sum(entry.processes for entry in self._active), 1)
        return workers, {kind: self._config.rule.scale(kind, workers) for kind in self._kinds}

    def _fill_delta_buffers(self, workers: int, everything: bool = False) -> Sequence[Shard]:
        """Compute the deltas, and fill the delta buffers of the shards that are sent.

        Returns these shards: the selection's choice, or with `everything` all pending shards,
        without momentum. If an element is not finite, takes the boxes' weights and returns no
        shard.
        """
        self._replica.locate()
        sums = []
        for shard in self._layout.changing:
            delta = self._replica.delta(shard, workers)
            delta_sum = self._selection.delta_sum(delta)
            if math.isnan(delta_sum):
                self._broken = self._replica.first_not_finite(shard, delta)
                self._adopt(self._layout.changing)
                return ()
            sums.append(delta_sum)
        choose = self._selection.pending if everything else self._selection.choose
        sent = choose(sums)
        for shard in sent:
            self._replica.fill_delta_buffer(shard, workers, momentum=not everything)
        self._pending = len(sent) < len(self._layout.changing)
        return sent

    def _send_all(self) -> None:
        """Add all unsent changes to the weights, or refuse the update."""
        self.wait_for_exchange()
        workers, scales = self._workers_and_scales()
        if self._pending and not self._config.rule.reads_first:
            self._exchange.add(self._fill_delta_buffers(workers, everything=True), scales)
            self._pending = False
        while rest := self._replica.fill_delta_buffers_with_rest():
            self._exchange.add(rest, scales)

    def _adopt(self, shards: Sequence[Shard]) -> None:
        """Copy the boxes' weights into the model. Discards unsent changes."""
        self._exchange.forget_changes()
        self._replica.adopt(shards)
        self._pending = False
        self._arrived = ()

    @contextmanager
    def _naming_process(self) -> Iterator[None]:
        """Name the process of a group's box in BoxUnreachable."""
        try:
            yield
        except smb.BoxUnreachable as error:
            process = self._job.process
            if not process:
                raise
            raise smb.BoxUnreachable(
                f"{error}. The group's box is {process}, without a store: if this process has "
                "ended, the weights are lost, and the job must start again from a checkpoint"
            ) from error
