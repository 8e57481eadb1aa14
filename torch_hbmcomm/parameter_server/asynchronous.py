"""The asynchronous parameter server: local steps, and exchanges with the weights in the boxes."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.groups import chosen_group
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.parameter_server.async_agreement import AsyncOffer, agree_on_server
from torch_hbmcomm.parameter_server.checkpoint import check_kind, count, part, restored_on_error
from torch_hbmcomm.parameter_server.config import AsyncConfig
from torch_hbmcomm.parameter_server.node import Disagreement, NodeWorker, nodes_of, split_nodes
from torch_hbmcomm.parameter_server.own_steps import OwnSteps
from torch_hbmcomm.parameter_server.rules import Rule, named
from torch_hbmcomm.parameter_server.sharding import Boxes, connect_boxes
from torch_hbmcomm.parameter_server.shared_model import check_optimizer
from torch_hbmcomm.parameter_server.worker import SENDING, AsyncWorker, Call, Plan
from torch_hbmcomm.tensors import is_finite

_FINISHED, _CLOSED = "finish()", "close()"
_SAVED = "what ParameterServer.state_dict() returned"
_FAILED = "an error in an exchange: the object can only be closed"
_BREAKING = (Call.STEP, Call.PULL, Call.SAVE, Call.FINISH)  # after an error in these: _FAILED


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
        group: the group that was formed with the boxes, or with `box` and `aggregate` the group
            whose ranks are summed; None: the default group
        timeout: seconds to wait for other workers
        aggregate: "node": the ranks of a node are one worker (Lee et al. 2020, section 2). They sum
            their changes over shared memory, the first of them exchanges with the boxes, and all
            take the result. Then every method except stats() is a collective of the node. None:
            each process is a worker. A process without a process group is a worker by itself.

    Without `box`, and with `aggregate`, the constructor is a collective. If one rank's arguments
    are wrong, each other rank raises RuntimeError with that rank's text, and the group stays
    usable.

    Raises:
        ValueError: incompatible arguments, or a model unlike the other workers' models
        TypeError: tensors that are not dense or not on the CPU
        MemoryError: a box is too small; says how much is needed.
        RuntimeError: another rank's arguments are wrong, or all other workers left while this one
            joined
        torch.distributed.DistBackendError: a rank has died; with `aggregate` also in later calls,
            if it is a rank of the node
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
        aggregate: Literal["node"] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._steps = self._refused = 0
        self._unsent = 0  # steps since this process's changes were last sent
        self._seconds = 0.0  # time of step() in exchanges, and in waits for them
        self._ended = ""  # the call or error after which methods are refused
        self._loaded = False
        nodes: list[list[int]] = []  # the ranks of each node, if these are one worker
        with ExitStack() as resources:
            connections = resources.enter_context(ExitStack())

            def prepare() -> Sequence[smb.Box]:
                """Check the arguments that a rank can check alone, and lay out its model."""
                if box is not None and group is not None and aggregate is None:
                    raise ValueError("give box, or a group that has boxes, not both")
                if box is None and not dist.is_initialized():
                    raise ValueError(
                        "there is no process group: give box, or form a group with a box"
                    )
                check_optimizer("every worker", model, optimizer)
                if aggregate == "node" and dist.is_initialized():
                    nodes.extend(nodes_of(chosen_group(group)))
                size = 1 if box is not None else len(nodes) or dist.get_world_size(group)
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
                    aggregate=aggregate,
                )
                boxes = smb.all_of(group) if box is None else connect_boxes(box, connections)
                self._plan = Plan.of(model, optimizer, self._config, len(boxes))
                return boxes

            boxes: Sequence[smb.Box] = ()

            def offer() -> AsyncOffer:
                nonlocal boxes
                boxes = prepare()
                manifest = self._plan.layout.manifest(self._config.group_terms)
                terms = self._config.node_terms
                if box is not None:
                    return AsyncOffer(manifest, name, {**terms, "name": repr(name)})
                # The name is unique, because several jobs may use the group's boxes.
                return AsyncOffer(manifest, f"{name}/{secrets.token_hex(8)}", terms)

            node = None
            if dist.is_initialized() and (box is None or group or aggregate is not None):
                whole = chosen_group(group)
                name = agree_on_server(whole, offer, lambda: nodes)
                if nodes:
                    node = split_nodes(whole, nodes, timeout)
            else:
                boxes = prepare()
            join = partial(AsyncWorker, boxes, name, self._plan, self._config)
            self._worker: AsyncWorker | NodeWorker
            if node is None:
                self._worker = join(self._plan.model)
            else:
                self._worker = NodeWorker(node, self._plan, join)
                if not self._worker.leads:
                    connections.close()
            resources.callback(self._worker.close)
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
        self._find(Call.STEP)  # raises before the optimizer changes the model
        with self._own_steps.allowed():
            loss = self._optimizer.step(closure) if closure else self._optimizer.step()
        self._steps += 1
        self._unsent += 1
        if self._unsent >= self._config.push_every:
            start = time.perf_counter()
            self._perform(Call.STEP)
            self._seconds += time.perf_counter() - start
        return loss

    def finish(self, wait: bool = False) -> None:
        """Send all unsent changes, and end this worker's training. Call it after the last step.

        Other workers no longer wait for this one (`staleness`). pull() and state_dict() still work.

        wait: True: return when every other worker has called finish() or close(), or has died. The
            wait needs the boxes alone, not the process group. A worker that dies is waited for
            until its lease ends. Raises TimeoutError, which names the workers that still train,
            after the constructor's `timeout`; pull() still works after it.

        With `aggregate` it returns when every rank of the node has called finish() or close().
        Until then this rank takes part in the others' exchanges, without changes of its own.
        """
        self._check("finish()")
        if self._ended != _FINISHED:
            self._find(Call.FINISH)
            self._perform(Call.FINISH)
            self._ended = _FINISHED
        if wait:
            self._perform(Call.WAIT)

    def pull(self) -> None:
        """Send all unsent changes, and copy the box's weights into the model, without rounding.

        With "easgd" the box's weights are the center, which replaces this worker's model.
        """
        self._check("pull()")
        self._find(Call.PULL)
        self._perform(Call.PULL)

    def state_dict(self) -> dict[str, Any]:
        """Send all unsent changes, and return a checkpoint. Call it on one worker; with `aggregate`
        on every rank of one node.

        It has "model", which is the model's state_dict() with the box's weights; "steps"; and with
        `drop` also "drop". It does not have the optimizer's state, because each worker has its own:
        save that separately.
        """
        self._check("state_dict()")
        tensors = self._find(Call.SAVE)
        before = [tensor.detach().clone() for tensor in tensors]
        self._perform(Call.SAVE)
        if self._config.rule.reads_first:
            with self._broken_by_errors():
                self._worker.read(before)
            weights = before
        else:
            weights = [tensor.detach().clone() for tensor in tensors]
        found = {id(tensor): copy for tensor, copy in zip(tensors, weights, strict=True)}

        def saved(value: Any) -> Any:
            local = value.detach().clone() if isinstance(value, torch.Tensor) else value
            return found.get(id(value), local)

        own = self._model.state_dict(keep_vars=True)
        return {
            "model": {key: saved(value) for key, value in own.items()},
            "steps": self._steps,
            **self._plan.selection.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint of state_dict(), on every worker before its first step.

        The number of workers may differ from the run that saved the state. The first worker that
        calls load_state_dict() writes the weights to the box, unless training has begun there.

        Raises ValueError for an incomplete state, a state of a SyncParameterServer, or weights that
        are not finite. Raises TypeError if the state or its model is no mapping, and RuntimeError
        for another model's state. In these cases nothing is loaded. With `aggregate` the other
        ranks of the node then raise RuntimeError with that text.
        """
        self._check("load_state_dict()")
        with restored_on_error(self._model):
            with self._withdrawing(Call.LOAD):
                if self._steps or self._loaded:
                    raise RuntimeError("a checkpoint is loaded once, and before the first step")
                self._plan.model.find(everything=True)
                check_kind(state, "ParameterServer", _SAVED)
                weights, steps = part(state, "model", _SAVED), count(state, "steps", _SAVED)
                _require_finite(self._model, weights)
                before = self._plan.selection.state_dict()
                self._model.load_state_dict(weights)
                self._plan.selection.load_state_dict(state)
            try:
                self._worker.meet(Call.LOAD, False)
            except Disagreement:
                self._plan.selection.load_state_dict(before)
                raise
        self._worker.act(Call.LOAD)
        self._loaded = True
        self._steps = steps

    def stats(self) -> dict[str, int | float]:
        """Return counters since the start: steps, pushed_bytes, pulled_bytes, refused (updates),
        and exchange_seconds (the time of step() without the local optimizer). Also returns workers
        (the number alive now) and ahead (the exchanges by which this worker leads the slowest).

        With `drop` it also returns sent_layers, dropped_layers, and the present threshold (-1:
        none).

        With `aggregate` the bytes are counted on the rank that exchanges with the boxes, and are 0
        on the other ranks of the node. On these ranks workers, ahead and the counts of layers are
        as of the node's last call.
        """
        self._check("stats()")
        return {
            "steps": self._steps,
            **self._worker.stats(),
            "refused": self._refused,
            "exchange_seconds": self._seconds,
        }

    def close(self) -> None:
        """Send all unsent changes, and leave the job. The model keeps its values.

        After an error it sends nothing, because part of the delta may be in the weights already.
        Does nothing the second time.

        With `aggregate` it returns when every rank of the node has called close(), as finish()
        does. After an error it waits for no rank.
        """
        if self._ended == _CLOSED:
            return
        send = self._ended != _FAILED
        self._ended = _CLOSED
        with self._resources:
            if send:
                self._perform(Call.CLOSE)
            else:
                self._worker.abandon()

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

    # -- calls of a worker -----------------------------------------------------------------------

    def _find(self, call: Call) -> list[torch.Tensor]:
        """Return the model's tensors as SharedModel.find() does, which raises if it has changed."""
        with self._withdrawing(call):
            return self._plan.model.find()

    @contextmanager
    def _withdrawing(self, call: Call) -> Iterator[None]:
        """If the block raises, let the ranks that are one worker with this one raise in `call`."""
        try:
            yield
        except Exception as error:
            self._worker.withdraw(call, error)
            raise

    def _perform(self, call: Call) -> None:
        """Take part in calls of the worker until `call` is done, and warn of refused updates."""
        done = None
        while done is not call:
            with self._broken_by_errors() if call in _BREAKING else nullcontext():
                done = self._worker.meet(call, self._unsent > 0)
                refused = self._worker.act(done)
            if done is Call.STEP or (done in SENDING and not self._config.rule.reads_first):
                self._unsent = 0
            if refused is None:
                continue
            self._refused += 1
            warnings.warn(
                f"{self._worker.who}: the update of {refused} in step {self._steps} is not finite; "
                "it was not sent, and the worker continues with the box's weights. Its optimizer's "
                "state may be spoilt: check the loss and the gradients before step().",
                RuntimeWarning,
                stacklevel=3,  # the caller of ParameterServer's method
            )

    @contextmanager
    def _broken_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Disagreement:
            raise
        except BaseException:
            self._ended = _FAILED
            raise


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
