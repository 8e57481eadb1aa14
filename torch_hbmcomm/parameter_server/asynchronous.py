"""A worker of the asynchronous mode: local steps, and exchanges with the weights in the boxes.

Ahn et al. 2018, section IV: in the sequential scenario an exchange follows the computation; in the
parallel one it runs in a thread of its own during the next step's, so that an iteration takes
max(T_comp, T_comm) (equation 1).
"""

from __future__ import annotations

import logging
import math
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.dropping import Dropping, layers_in
from torch_hbmcomm.parameter_server.exchange import Exchange
from torch_hbmcomm.parameter_server.layout import Piece, difference, lay_out
from torch_hbmcomm.parameter_server.replica import NotFiniteError, Replica
from torch_hbmcomm.parameter_server.roster import Roster
from torch_hbmcomm.parameter_server.selection import Everything, Selection
from torch_hbmcomm.parameter_server.shards import Shards, too_small
from torch_hbmcomm.parameter_server.tensors import described, model_tensors
from torch_hbmcomm.parameter_server.terms import Terms
from torch_hbmcomm.parameter_server.versions import Versions

_log = logging.getLogger(__name__)

_FINISHED, _CLOSED = "finish()", "close()"
_FAILED = "an error in an exchange: the object can only be closed"


class Asynchronous:
    """What ParameterServer(mode="async") does; its docstring is the reference."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        boxes: Sequence[smb.Box],
        name: str,
        terms: Terms,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._terms = terms
        tensors = model_tensors(model, terms.shared_buffers)
        self._tensors = [tensor for _, tensor, _ in tensors]
        shapes = [described(*one) for one in tensors]
        self._selection: Selection
        if terms.drop is None:
            self._layers = 0  # that have a version
            self._layout = lay_out(shapes, len(boxes), terms.wire)
            self._selection = Everything(self._layout.changing)
        else:
            layers = layers_in(shapes, terms.wire, terms.drop)
            self._layers = len(layers)
            members = [layer.members for layer in layers]
            self._layout = lay_out(shapes, len(boxes), terms.wire, members)
            self._selection = Dropping(terms.drop, layers, self._layout.changing)
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[list[Piece]] | None = None
        self._arrived: Sequence[Piece] = ()  # of the last exchange, not taken yet
        self._steps = self._refused = 0
        self._unsent = 0  # steps since the last exchange
        self._pending = False  # whether the model has anything that was not sent
        self._seconds = 0.0  # in exchanges, as step() sees them
        self._ended = ""  # what the next method comes too late after
        self._loaded = False
        with ExitStack() as joining:
            self._join(boxes, name, joining)
            if terms.overlap:
                self._thread = joining.enter_context(ThreadPoolExecutor(1, "hbm-exchange"))
            self._membership = joining.pop_all()

    # -- training --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._check("step()", _FINISHED)
        loss = self._optimizer.step(closure) if closure else self._optimizer.step()
        self._steps += 1
        self._unsent += 1
        self._pending = True
        if self._unsent == self._terms.push_every:
            start = time.perf_counter()
            with self._broken_by_errors():
                if self._thread is None:
                    self._exchange_now()
                else:
                    self._exchange_ahead(self._thread)
            self._unsent = 0
            self._seconds += time.perf_counter() - start
        return loss

    def finish(self) -> None:
        self._check("finish()")
        with self._broken_by_errors():
            self._send_all()
            self._roster.retire()
        self._ended = _FINISHED

    def pull(self) -> None:
        self._check("pull()")
        with self._broken_by_errors():
            self._send_all()
            self._adopt(self._layout.changing)

    def state_dict(self) -> dict[str, Any]:
        self._check("state_dict()")
        weights = [tensor.detach().clone() for tensor in self._tensors]
        with self._broken_by_errors():
            self._send_all()
            if not self._terms.rule.reads_first:
                self._adopt(self._layout.changing)  # with what was just sent
            self._replica.read(weights, self._layout.changing)
        found = {id(tensor): copy for tensor, copy in zip(self._tensors, weights, strict=True)}
        own = self._model.state_dict(keep_vars=True)
        return {
            "model": {key: found.get(id(value), value) for key, value in own.items()},
            "steps": self._steps,
            **self._selection.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check("load_state_dict()")
        if self._steps or self._loaded:
            raise RuntimeError("a checkpoint is loaded once, and before the first step")
        self._selection.load_state_dict(state)  # refuses what does not fit before anything moves
        self._model.load_state_dict(state["model"])
        if self._roster.begun():
            _log.warning("training has begun in the box: its weights stay, not the checkpoint's")
        elif self._roster.claims_load():
            self._replica.give()
            self._roster.set_loaded()
        else:
            self._roster.wait_loaded()
        self._loaded = True
        self._steps = int(state["steps"])
        self._adopt(self._layout.pieces)

    def stats(self) -> dict[str, int | float]:
        self._check("stats()")
        return {
            "steps": self._steps,
            "workers": len(self._roster.active()),
            "ahead": self._exchange.lead(),
            "pushed_bytes": self._exchange.pushed_bytes,
            "pulled_bytes": self._exchange.pulled_bytes,
            "refused": self._refused,
            "exchange_seconds": self._seconds,
            **self._selection.stats(),
        }

    def close(self, send: bool = True) -> None:
        """send: what is unsent, first; not after an error, when part of it may be in the weights.
        Does nothing the second time."""
        if self._ended == _CLOSED:
            return
        send = send and self._ended != _FAILED
        self._ended = _CLOSED
        with self._membership:
            if send:
                self._send_all()

    def _check(self, method: str, *too_late: str) -> None:
        if self._ended in (_CLOSED, _FAILED, *too_late):
            raise RuntimeError(f"{method} after {self._ended}")

    @contextmanager
    def _broken_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._ended = _FAILED
            raise

    # -- joining ---------------------------------------------------------------------------------

    def _join(self, boxes: Sequence[smb.Box], name: str, joining: ExitStack) -> None:
        """joining: is given what has to be done to leave."""
        terms, layout = self._terms, self._layout
        temporary = not terms.keep
        try:
            self._roster = Roster(boxes[0], name, terms.timeout, temporary)
        except MemoryError as error:
            raise too_small(boxes[0], layout, 0) from error
        joining.callback(self._roster.leave)
        leads = self._roster.leads()
        if not leads:
            self._roster.begin_anew()
        manifest = layout.manifest(terms.shared)
        try:
            if not leads:
                self._agree(boxes[0], name, manifest, joining)
            mode: Literal["auto", "attach"] = "auto" if leads else "attach"
            self._shards = Shards(boxes, name, layout, mode, temporary)
            joining.callback(self._shards.close)
            versions = self._versions(boxes[0], name, mode, joining)
        except smb.NoSuchKey as error:
            raise RuntimeError(
                f"the other workers of {name!r} have just left; start this one again"
            ) from error
        self._replica = Replica(self._tensors, layout, self._shards, terms.rule)
        if leads:
            segment = boxes[0].alloc(len(manifest), f"{name}/manifest", temporary=temporary)
            joining.callback(segment.free)
            segment.write(0, len(manifest), source=manifest)
            self._replica.give()
            mark = 1 + secrets.randbits(62)
            self._shards.mark(mark)
            self._roster.publish(mark)
        self._shards.check_mark(self._roster.ready())
        bound = terms.staleness
        if bound is not None and terms.overlap:
            bound -= 1  # an exchange that is under way is one step behind
        changing = layout.changing
        self._exchange = Exchange(self._shards, self._roster, changing, versions, bound)
        self._adopt(layout.pieces)
        if clock := self._roster.activate(math.inf if bound is None else bound + 1):
            self._exchange.begin(clock)
            self._adopt(changing)  # with what was pushed before this worker counted
        self._roster.wait_for_workers(terms.workers)

    def _versions(
        self, box: smb.Box, name: str, mode: Literal["auto", "attach"], joining: ExitStack
    ) -> Versions | None:
        if not self._layers:
            return None
        try:
            versions = Versions(box, name, self._layers, mode, not self._terms.keep)
        except MemoryError as error:
            raise too_small(box, self._layout, 0) from error
        joining.callback(versions.close)
        return versions

    def _agree(self, box: smb.Box, name: str, manifest: bytes, joining: ExitStack) -> None:
        segment = box.alloc(None, f"{name}/manifest", "attach")
        joining.callback(segment.free)
        segment.read()
        if why := difference(manifest, bytes(segment.buffer)):
            raise ValueError(f"this worker does not fit the others of {name!r}: {why}")

    # -- exchanging ------------------------------------------------------------------------------

    def _exchange_now(self) -> None:
        workers = self._workers()
        scale = self._scale(workers)
        reads_first = self._terms.rule.reads_first
        if reads_first:
            for _ in self._exchange.pull(self._layout.changing):
                pass
        sent = self._offer(workers, self._selection.choose)
        if reads_first:
            for piece in sent:
                self._replica.take(piece)
            self._exchange.push(sent, scale)
            return
        layers = {piece.layer for piece in sent}
        for piece in self._exchange.push_and_pull(sent, scale):
            if piece.layer in layers:
                self._replica.take(piece)
            else:
                self._replica.take_unsent(piece)

    def _exchange_ahead(self, thread: ThreadPoolExecutor) -> None:
        self._settle()
        workers = self._workers()
        scale = self._scale(workers)
        sent = self._offer(workers, self._selection.choose)
        layers = {piece.layer for piece in sent}
        for piece in sent:
            self._replica.take_ahead(piece, scale(piece))
        for piece in self._arrived:
            if piece.layer not in layers:
                self._replica.take_unsent(piece)
        self._under_way = thread.submit(lambda: list(self._exchange.push_and_pull(sent, scale)))

    def _settle(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self._arrived = under_way.result()

    def _offer(
        self, workers: int, choose: Callable[[Sequence[float]], Sequence[Piece]]
    ) -> Sequence[Piece]:
        """What is sent, and lies in the slots; nothing, if the update was refused."""
        try:
            sent = self._replica.offer(workers, self._selection.weigh, choose)
        except NotFiniteError as error:
            self._refuse(str(error))
            return ()
        self._pending = len(sent) < len(self._layout.changing)
        return sent

    def _send_all(self) -> None:
        """All that this worker's optimizer did is in the weights, or was refused."""
        self._settle()
        workers = self._workers()
        scale = self._scale(workers)
        if self._pending and not self._terms.rule.reads_first:
            self._exchange.add(self._offer(workers, self._selection.pending), scale)
            self._pending = False
            self._unsent = 0
        while rest := self._replica.offer_rest():
            self._exchange.add(rest, scale)

    def _adopt(self, pieces: Sequence[Piece]) -> None:
        """The weights become the model's; what was not sent is gone."""
        self._exchange.look()
        self._replica.adopt(pieces)
        self._pending = False
        self._arrived = ()
        if self._terms.overlap:
            self._exchange.prefetch(self._layout.changing)

    def _refuse(self, name: str) -> None:
        """The weights stay clean, and this worker goes on from them."""
        self._refused += 1
        warnings.warn(
            f"worker {self._roster.index}: the update of {name} in step {self._steps} is not "
            "finite; it was not sent, and the worker goes on with the box's weights. Its "
            "optimizer's state may be spoilt: check the loss and the gradients before step().",
            RuntimeWarning,
            stacklevel=6,  # the caller of ParameterServer
        )
        self._adopt(self._layout.changing)

    def _workers(self) -> int:
        """That are alive, as far as is known."""
        self._roster.notice_deaths()
        return max(len(self._roster.active()), 1)

    def _scale(self, workers: int) -> Callable[[Piece], float]:
        return lambda piece: self._terms.rule.scale(piece.kind, workers)
