"""The asynchronous parameter server: local steps, and exchanges with the weights in the boxes.

Ahn et al. 2018, section IV, has two scenarios. In the sequential one an exchange follows the
computation. In the parallel one a thread runs the exchange during the next step's computation, so
an iteration takes max(T_comp, T_comm) (equation 1).
"""

from __future__ import annotations

import logging
import math
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.agreement import together
from torch_hbmcomm.groups import chosen_group
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.parameter_server.checkpoint import check_kind, count, part, restored_on_error
from torch_hbmcomm.parameter_server.config import AsyncConfig
from torch_hbmcomm.parameter_server.exchange import BoundedExchange, Scales
from torch_hbmcomm.parameter_server.job import AsyncJob
from torch_hbmcomm.parameter_server.layout import Shard, lay_out, manifest_mismatch
from torch_hbmcomm.parameter_server.own_steps import OwnSteps
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.replica import Replica, model_tensors
from torch_hbmcomm.parameter_server.rules import Rule, named
from torch_hbmcomm.parameter_server.selection import AsyncLayerDrop, Selection, SendAll, layers_in
from torch_hbmcomm.parameter_server.sharding import Boxes, connect_boxes
from torch_hbmcomm.parameter_server.shared_model import SharedModel, check_optimizer
from torch_hbmcomm.pipeline import TaskPipeline
from torch_hbmcomm.tensors import check_fills_memory, is_finite

_log = logging.getLogger(__name__)

_FINISHED, _CLOSED = "finish()", "close()"
_SAVED = "what ParameterServer.state_dict() returned"
_FAILED = "an error in an exchange: the object can only be closed"


class ParameterServer:
    """Train one model by several workers that share its weights, and do not wait for one another.

        ps = hbmcomm.ParameterServer(model, optimizer)  # instead of DistributedDataParallel
        for batch, target in data:
            optimizer.zero_grad()
            loss(model(batch), target).backward()
            ps.step()  # instead of optimizer.step()

    The weights are in one memory box or several. step() runs the local optimizer, adds the delta to
    the weights on the box, and reads fresh weights back (Ahn et al. 2018; Dean et al. 2012). When a
    worker dies, the others continue. At the start the first worker's model becomes the weights.
    Every later worker takes the weights that it finds.

    Args:
        model: dense CPU parameters and buffers. Parameters that require a gradient are trained.
            Workers receive all other tensors once, at the start, except shared `buffers`.
        optimizer: any optimizer of PyTorch with the model's parameters; each worker has its own,
            whose state is not shared
        box: addresses or connections of the boxes that have the weights, the same for all workers
            in the same order; None: the group's boxes (Options(parameter_server=...))
        staleness: the number of exchanges that a worker may be ahead of the slowest live worker (Ho
            et al. 2013); None: any. A worker that dies counts until its lease ends. With 0, plain
            SGD under "downpour" gives the same as synchronous training; with other optimizers the
            workers' local updates are averaged.
        push_every: steps between two exchanges
        rule: "downpour", "easgd" (Zhang et al. 2015), or an object of parameter_server.rules. With
            "easgd" only step() sends changes
        transfer: torch.bfloat16: float32 deltas and weights are sent as bfloat16. The rounding
            error of a delta is sent with the next delta; the box's weights stay float32. None: each
            tensor's own type.
        buffers: "shared": floating-point buffers (BatchNorm's statistics) are averaged as
            parameters are; "local": each worker has its own. Integer buffers are always local.
        overlap: True: an exchange runs during the next step's computation, and its weights are one
            step older. False: fresh weights are in the model when step() returns. None: True,
            unless staleness is 0 or layers are dropped.
        drop: the rule by which layers with small changes are sent later (Lee et al. 2020). Each
            worker decides alone, and reads back only the layers that it has sent or other workers
            have changed. None: everything is sent.
        name: this job's name in the boxes, if box is given; workers of one name train one model
        workers: the number of workers to wait for at the start; None: the group's size, or 1
        keep: True: the weights stay in the boxes when the last worker leaves; a job of the same
            name then continues with them
        group: the group that was formed with the boxes; None: the default group
        timeout: seconds to wait for other workers

    Without `box` the constructor is a collective. If one rank's arguments are wrong, each other
    rank raises RuntimeError with that rank's text, and the group stays usable.

    Raises:
        ValueError: incompatible arguments, or a model unlike the other workers' models
        TypeError: tensors that are not dense or not on the CPU
        MemoryError: a box is too small; says how much is needed.
        RuntimeError: another rank's arguments are wrong, or all other workers left while this one
            joined
        TimeoutError: other workers did not come within `timeout`.
        smb.BoxError: an error of a box. After such an error in step() the object can only be
            closed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        box: Boxes | None = None,
        staleness: int | None = None,
        push_every: int = 1,
        rule: str | Rule = "downpour",
        transfer: torch.dtype | None = None,
        buffers: Literal["shared", "local"] = "shared",
        overlap: bool | None = None,
        name: str = "parameter-server",
        workers: int | None = None,
        keep: bool = False,
        group: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
        drop: LayerDrop | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._pipeline: TaskPipeline | None = None
        self._in_flight: Future[list[Shard]] | None = None  # the exchange during this step
        self._arrived: Sequence[Shard] = ()  # shards that the last exchange fetched, unapplied
        self._steps = self._refused = 0
        self._unsent = 0  # steps since the last exchange
        self._pending = False  # True: the model has unsent changes
        self._seconds = 0.0  # time of step() in exchanges, and in waits for them
        self._ended = ""  # the call or error after which methods are refused
        self._loaded = False
        with ExitStack() as resources:

            def prepare() -> Sequence[smb.Box]:
                """Check the arguments that a rank can check alone, and lay out its model."""
                if box is not None and group is not None:
                    raise ValueError("give box, or a group that has boxes, not both")
                if box is None and not dist.is_initialized():
                    raise ValueError(
                        "there is no process group: give box, or form a group with a box"
                    )
                check_optimizer("every worker", model, optimizer)
                size = 1 if box is not None else dist.get_world_size(group)
                self._config = AsyncConfig(
                    rule=named(rule),
                    staleness=staleness,
                    push_every=push_every,
                    transfer=transfer,
                    buffers=buffers,
                    overlap=staleness != 0 and drop is None if overlap is None else overlap,
                    workers=size if workers is None else workers,
                    keep=keep,
                    timeout=timeout,
                    drop=drop,
                )
                boxes = smb.all_of(group) if box is None else connect_boxes(box, resources)
                self._lay_out(len(boxes))
                return boxes

            if dist.is_initialized() and (box is None or group is not None):
                boxes, name = self._prepare_together(chosen_group(group), prepare, name)
            else:
                boxes = prepare()
            self._join(boxes, name, resources)
            if self._config.overlap:
                self._pipeline = resources.enter_context(TaskPipeline("hbm-exchange"))
            self._own_steps = OwnSteps(optimizer)
            resources.callback(self._own_steps.release)
            self._resources = resources.pop_all()

    # -- training --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the local optimizer, and exchange with the boxes every `push_every` steps. Call it
        after backward(). Returns the closure's result.

        With overlap the exchange runs during the next step, in a thread.

        An update that is not finite is not sent. stats()["refused"] counts it, a RuntimeWarning
        names the parameter, and this worker continues with the box's weights.

        Until close() the optimizer's own step() raises RuntimeError.

        Args:
            closure: passed to the optimizer's step(); None: no closure
        """
        self._check("step()", _FINISHED)
        self._shared.find()  # raises before the optimizer changes the model
        with self._own_steps.allowed():
            loss = self._optimizer.step(closure) if closure else self._optimizer.step()
        self._steps += 1
        self._unsent += 1
        self._pending = True
        if self._unsent == self._config.push_every:
            start = time.perf_counter()
            with self._broken_by_errors():
                if self._pipeline is not None:
                    self._exchange_during_next_step(self._pipeline)
                elif self._config.rule.reads_first:
                    self._pull_then_push()
                else:
                    self._push_and_pull()
            self._unsent = 0
            self._seconds += time.perf_counter() - start
        return loss

    def _exchange_during_next_step(self, pipeline: TaskPipeline) -> None:
        """Apply the arrived weights, and start an exchange that runs during the next step.

        Waits for the last exchange first, because that exchange uses the delta buffers until it
        ends.
        """
        self._wait_for_exchange()
        workers, scales = self._workers_and_scales()
        sent = self._fill_delta_buffers(workers)
        layers = {shard.layer for shard in sent}
        for shard in sent:
            self._replica.take_ahead(shard, scales[shard.kind])
        for shard in self._arrived:
            if shard.layer not in layers:
                self._replica.take_unsent(shard)
        self._in_flight = pipeline.submit(
            partial(self._exchange.start, sent, scales), partial(self._exchange.end, sent)
        )

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
        self._exchange.pull(self._layout.changing)
        sent = self._fill_delta_buffers(workers)
        for shard in sent:
            self._replica.take(shard)
        self._exchange.push(sent, scales)

    def finish(self, wait: bool = False) -> None:
        """Send all unsent changes, and end this worker's training. Call it after the last step.

        Other workers no longer wait for this one (`staleness`). pull() and state_dict() still work.

        wait: True: return when every other worker has called finish() or close(), or has died. The
            wait needs the boxes alone, not the process group. A worker that dies is waited for
            until its lease ends. Raises TimeoutError, which names the workers that still train,
            after the constructor's `timeout`; pull() still works after it.
        """
        self._check("finish()")
        if self._ended != _FINISHED:
            self._shared.find()
            with self._broken_by_errors():
                self._send_all()
                self._job.membership.retire()
            self._ended = _FINISHED
        if wait:
            with self._naming_process():
                self._job.membership.wait_retired()

    def pull(self) -> None:
        """Send all unsent changes, and copy the box's weights into the model, without rounding.

        With "easgd" the box's weights are the center, which replaces this worker's model.
        """
        self._check("pull()")
        self._shared.find()
        with self._broken_by_errors():
            self._send_all()
            self._adopt(self._layout.changing)

    def state_dict(self) -> dict[str, Any]:
        """Send all unsent changes, and return a checkpoint. Call it on one worker.

        It has "model", which is the model's state_dict() with the box's weights; "steps"; and with
        `drop` also "drop". It does not have the optimizer's state, because each worker has its own:
        save that separately.
        """
        self._check("state_dict()")
        tensors = self._shared.find()
        weights = [tensor.detach().clone() for tensor in tensors]
        with self._broken_by_errors():
            self._send_all()
            if not self._config.rule.reads_first:
                self._adopt(self._layout.changing)  # the box's weights have the delta just sent
            self._replica.read(weights, self._layout.changing)
        found = {id(tensor): copy for tensor, copy in zip(tensors, weights, strict=True)}

        def saved(value: Any) -> Any:
            local = value.detach().clone() if isinstance(value, torch.Tensor) else value
            return found.get(id(value), local)

        own = self._model.state_dict(keep_vars=True)
        return {
            "model": {key: saved(value) for key, value in own.items()},
            "steps": self._steps,
            **self._selection.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint of state_dict(), on every worker before its first step.

        The number of workers may differ from the run that saved the state. The first worker that
        calls load_state_dict() writes the weights to the box, unless training has begun there.

        Raises ValueError for an incomplete state, a state of a SyncParameterServer, or weights that
        are not finite. Raises TypeError if the state or its model is no mapping, and RuntimeError
        for another model's state. In these cases nothing is loaded.
        """
        self._check("load_state_dict()")
        if self._steps or self._loaded:
            raise RuntimeError("a checkpoint is loaded once, and before the first step")
        self._shared.find(everything=True)
        check_kind(state, "ParameterServer", _SAVED)
        weights, steps = part(state, "model", _SAVED), count(state, "steps", _SAVED)
        _require_finite(self._model, weights)
        with restored_on_error(self._model):
            self._model.load_state_dict(weights)
            self._selection.load_state_dict(state)
        membership = self._job.membership
        if membership.begun():
            _log.warning("training has begun in the box: its weights stay, not the checkpoint's")
        elif membership.claims_load():
            self._replica.give()
            membership.set_loaded()
        else:
            membership.wait_loaded()
        self._loaded = True
        self._steps = steps
        self._adopt(self._layout.shards)

    def stats(self) -> dict[str, int | float]:
        """Return counters since the start: steps, pushed_bytes, pulled_bytes, refused (updates),
        and exchange_seconds (the time of step() without the local optimizer). Also returns workers
        (the number alive now) and ahead (the exchanges by which this worker leads the slowest).

        With `drop` it also returns sent_layers, dropped_layers, and the present threshold (-1:
        none).
        """
        self._check("stats()")
        return {
            "steps": self._steps,
            "workers": len(self._job.membership.active()),
            "ahead": self._exchange.lead(),
            "pushed_bytes": self._exchange.pushed_bytes,
            "pulled_bytes": self._exchange.pulled_bytes,
            "refused": self._refused,
            "exchange_seconds": self._seconds,
            **self._selection.stats(),
        }

    def close(self) -> None:
        """Send all unsent changes, and leave the job. The model keeps its values.

        After an error it sends nothing, because part of the delta may be in the weights already.
        Does nothing the second time.
        """
        if self._ended == _CLOSED:
            return
        send = self._ended != _FAILED
        self._ended = _CLOSED
        with self._resources:
            if send:
                self._send_all()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close. If the block raised, send nothing."""
        if kind is not None and self._ended != _CLOSED:
            self._ended = _FAILED
        self.close()

    def _check(self, method: str, *too_late: str) -> None:
        if self._ended in (_CLOSED, _FAILED, *too_late):
            raise RuntimeError(f"{method} after {self._ended}")

    @contextmanager
    def _broken_by_errors(self) -> Iterator[None]:
        try:
            with self._naming_process():
                yield
        except BaseException:
            self._ended = _FAILED
            raise

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

    # -- joining ---------------------------------------------------------------------------------

    def _prepare_together(
        self, group: dist.ProcessGroup, prepare: Callable[[], Sequence[smb.Box]], name: str
    ) -> tuple[Sequence[smb.Box], str]:
        """Call prepare() on every rank, and compare the layouts. Collective.

        Returns the group's boxes, and a job name. The name is unique, because several jobs may use
        the same boxes.
        """
        boxes: list[smb.Box] = []

        def attempt() -> tuple[bytes, str]:
            boxes.extend(prepare())
            manifest = self._layout.manifest(self._config.manifest_terms)
            return manifest, f"{name}/{secrets.token_hex(8)}"

        try:
            manifests = together(group, attempt, "a ParameterServer")
        except dist.DistBackendError as error:
            raise dist.DistBackendError(
                f"the ranks of the group cannot agree on a ParameterServer: {error}. If its box "
                "still serves, the live ranks can go on without the group: pass "
                "box=hbmcomm.smb.all_of(group), a name, and workers=, their number"
            ) from error
        first, name = manifests[0]
        for rank, (manifest, _) in enumerate(manifests):
            if why := manifest_mismatch(first, manifest):
                raise ValueError(
                    f"the ParameterServers of rank 0 (here) and rank {rank} (there) do not fit "
                    f"each other: {why}"
                )
        return boxes, name

    def _lay_out(self, boxes: int) -> None:
        """Lay the model's tensors out in the boxes, and make the object that selects layers."""
        config = self._config
        tensors = model_tensors(self._model, config.buffers == "shared")
        for name, tensor, kind in tensors:
            check_fills_memory(kind, name, tensor)
        specs = [TensorSpec.of(*one) for one in tensors]
        self._shared = SharedModel(self._model, self._optimizer, specs)
        self._selection: Selection
        if config.drop is None:
            self._layers = 0  # layers with a version counter
            self._layout = lay_out(specs, boxes, config.transfer_name)
            self._selection = SendAll(self._layout.changing)
        else:
            layers = layers_in(specs, config.transfer_name, config.drop)
            self._layers = len(layers)
            members = [layer.members for layer in layers]
            self._layout = lay_out(specs, boxes, config.transfer_name, members)
            self._selection = AsyncLayerDrop(config.drop, layers, self._layout.changing)
        self._kinds = {shard.kind for shard in self._layout.changing}

    def _join(self, boxes: Sequence[smb.Box], name: str, resources: ExitStack) -> None:
        """Join the job, and take its weights. Closing `resources` leaves the job."""
        config, changing = self._config, self._layout.changing
        self._job = job = AsyncJob(boxes, name, self._layout, config, self._layers)
        resources.callback(job.close)
        self._replica = Replica(self._shared, job.exchange, config.rule)
        if job.leads:
            self._replica.give()
            job.publish()
        job.weights.check_mark(job.membership.ready())
        ahead = config.exchanges_ahead
        self._exchange = BoundedExchange(
            job.exchange, job.membership, changing, job.versions, ahead
        )
        self._adopt(self._layout.shards)
        if clock := job.membership.activate(math.inf if ahead is None else ahead + 1):
            self._exchange.count_from(clock)
            # Take the weights again: before activate() other workers did not wait for this one, and
            # may have pushed.
            self._adopt(changing)
        job.membership.wait_for_workers(config.workers)

    # -- parts of an exchange --------------------------------------------------------------------

    def _wait_for_exchange(self) -> None:
        """Wait for the exchange in flight, if any; then self._arrived has its shards."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            self._arrived = in_flight.result()

    def _workers_and_scales(self) -> tuple[int, Scales]:
        """Return the number of workers believed alive, and the scale of deltas for each kind of
        shard."""
        self._job.membership.notice_deaths()
        workers = max(len(self._job.membership.active()), 1)
        return workers, {kind: self._config.rule.scale(kind, workers) for kind in self._kinds}

    def _fill_delta_buffers(self, workers: int, everything: bool = False) -> Sequence[Shard]:
        """Compute the deltas, and fill the delta buffers of the shards that are sent.

        Returns these shards: the selection's choice, or with `everything` all pending shards. If an
        element is not finite, refuses the update and returns no shard.
        """
        self._replica.locate()
        sums = []
        for shard in self._layout.changing:
            delta = self._replica.delta(shard, workers)
            delta_sum = self._selection.delta_sum(delta)
            if math.isnan(delta_sum):
                self._refuse(self._replica.first_not_finite(shard, delta))
                return ()
            sums.append(delta_sum)
        choose = self._selection.pending if everything else self._selection.choose
        sent = choose(sums)
        for shard in sent:
            self._replica.fill_delta_buffer(shard, workers)
        self._pending = len(sent) < len(self._layout.changing)
        return sent

    def _refuse(self, name: str) -> None:
        """Count an update that is not sent, warn of it, and copy the box's weights into the
        model."""
        self._refused += 1
        warnings.warn(
            f"worker {self._job.membership.index}: the update of {name} in step {self._steps} is "
            "not finite; it was not sent, and the worker continues with the box's weights. Its "
            "optimizer's state may be spoilt: check the loss and the gradients before step().",
            RuntimeWarning,
            stacklevel=5,  # the caller of ParameterServer's method
        )
        self._adopt(self._layout.changing)

    def _send_all(self) -> None:
        """Add all unsent changes to the weights, or refuse the update."""
        self._wait_for_exchange()
        workers, scales = self._workers_and_scales()
        if self._pending and not self._config.rule.reads_first:
            self._exchange.add(self._fill_delta_buffers(workers, everything=True), scales)
            self._pending = False
            self._unsent = 0
        while rest := self._replica.fill_delta_buffers_with_rest():
            self._exchange.add(rest, scales)

    def _adopt(self, shards: Sequence[Shard]) -> None:
        """Copy the box's weights into the model. Discards unsent changes."""
        self._exchange.forget_changes()
        self._replica.adopt(shards)
        self._pending = False
        self._arrived = ()
        if self._config.overlap:
            self._exchange.prefetch(self._layout.changing)


def _require_finite(model: nn.Module, weights: Any) -> None:
    """Raise ValueError if a parameter's weights have a NaN or an infinity, and TypeError if
    `weights` is no mapping. Buffers may have infinities, as masks do."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"the state's 'model' is a mapping, not {type(weights).__name__}")
    for name, _ in model.named_parameters():
        found = weights.get(name)
        if isinstance(found, torch.Tensor) and not is_finite(found):
            raise ValueError(
                f"the checkpoint's {name} is not finite (it has a NaN or an infinity): nothing was "
                "loaded, since every worker would take it; load an earlier checkpoint"
            )
