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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.exchange import Exchange
from torch_hbmcomm.parameter_server.layout import Piece, difference, lay_out
from torch_hbmcomm.parameter_server.replica import Replica
from torch_hbmcomm.parameter_server.roster import Roster
from torch_hbmcomm.parameter_server.rules import Rule
from torch_hbmcomm.parameter_server.shards import Shards, too_small
from torch_hbmcomm.parameter_server.tensors import described, model_tensors

_log = logging.getLogger(__name__)

_FINISHED, _CLOSED = "finish()", "close()"
_FAILED = "an error in an exchange: the object can only be closed"


@dataclass(frozen=True)
class Terms:
    """As ParameterServer's arguments of these names; `workers` have to join before the first step.

    Raises ValueError for what does not go together.
    """

    rule: Rule
    staleness: int | None
    push_every: int
    transfer: torch.dtype | None
    shared_buffers: bool
    overlap: bool
    workers: int
    keep: bool
    timeout: float

    def __post_init__(self) -> None:
        for name in ("staleness", "push_every", "workers"):
            value = getattr(self, name)
            if not isinstance(value, int) and (name, value) != ("staleness", None):
                raise TypeError(f"{name} is a whole number, not {value!r}")
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness is not negative: {self.staleness}; None is no bound")
        if self.staleness == 0 and self.overlap:
            raise ValueError("with staleness=0 an exchange cannot overlap the next step")
        if self.push_every < 1:
            raise ValueError(f"push_every is at least 1, not {self.push_every}")
        if self.workers < 1:
            raise ValueError(f"workers is at least 1, not {self.workers}")
        if self.timeout <= 0:
            raise ValueError(f"timeout is more than 0 seconds, not {self.timeout}")
        if self.transfer not in (None, torch.bfloat16):
            raise ValueError(f"transfer is None or torch.bfloat16, not {self.transfer}")

    @property
    def shared(self) -> dict[str, Any]:
        """Those that all workers have to agree on."""
        return {"rule": repr(self.rule), "staleness": self.staleness}


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
        self._rule = terms.rule
        tensors = model_tensors(model, terms.shared_buffers)
        self._tensors = [tensor for _, tensor, _ in tensors]
        self._layout = lay_out(
            [described(*one) for one in tensors],
            len(boxes),
            None if terms.transfer is None else str(terms.transfer).removeprefix("torch."),
        )
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        self._steps = self._unsent = self._refused = 0
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
            if not self._rule.reads_first:
                self._adopt(self._layout.changing)  # with what was just sent
            self._replica.read(weights, self._layout.changing)
        found = {id(tensor): copy for tensor, copy in zip(self._tensors, weights, strict=True)}
        own = self._model.state_dict(keep_vars=True)
        return {
            "model": {key: found.get(id(value), value) for key, value in own.items()},
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check("load_state_dict()")
        if self._steps or self._loaded:
            raise RuntimeError("a checkpoint is loaded once, and before the first step")
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
            "pushed_bytes": self._shards.pushed_bytes,
            "pulled_bytes": self._shards.pulled_bytes,
            "refused": self._refused,
            "exchange_seconds": self._seconds,
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
            self._shards = Shards(boxes, name, layout, "auto" if leads else "attach", temporary)
        except smb.NoSuchKey as error:
            raise RuntimeError(
                f"the other workers of {name!r} have just left; start this one again"
            ) from error
        joining.callback(self._shards.close)
        self._replica = Replica(self._tensors, layout, self._shards, self._rule)
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
        self._exchange = Exchange(self._shards, self._roster, bound)
        self._adopt(layout.pieces)
        if clock := self._roster.activate(math.inf if bound is None else bound + 1):
            self._exchange.begin(clock)
            self._adopt(layout.changing)  # with what was pushed before this worker counted
        self._roster.wait_for_workers(terms.workers)

    def _agree(self, box: smb.Box, name: str, manifest: bytes, joining: ExitStack) -> None:
        segment = box.alloc(None, f"{name}/manifest", "attach")
        joining.callback(segment.free)
        segment.read()
        if why := difference(manifest, bytes(segment.buffer)):
            raise ValueError(f"this worker does not fit the others of {name!r}: {why}")

    # -- exchanging ------------------------------------------------------------------------------

    def _exchange_now(self) -> None:
        changing = self._layout.changing
        workers = self._workers()
        if self._rule.reads_first:
            for _ in self._exchange.pull(changing):
                pass
        refused = self._replica.offer(workers)
        if refused is not None:
            self._refuse(refused)
            self._exchange.push([], self._scale(workers))
            if not self._rule.reads_first:
                for _ in self._exchange.pull([]):
                    pass
        elif self._rule.reads_first:
            for piece in changing:
                self._replica.take(piece)
            self._exchange.push(changing, self._scale(workers))
        else:
            for piece in self._exchange.push_and_pull(changing, self._scale(workers)):
                self._replica.take(piece)

    def _exchange_ahead(self, thread: ThreadPoolExecutor) -> None:
        self._settle()
        changing = self._layout.changing
        workers = self._workers()
        refused = self._replica.offer(workers)
        if refused is not None:
            self._refuse(refused)
            changing = ()
        scale = self._scale(workers)
        for piece in changing:
            self._replica.take_ahead(piece, scale(piece))

        def run() -> None:
            for _ in self._exchange.push_and_pull(changing, scale):
                pass

        self._under_way = thread.submit(run)

    def _settle(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def _send_all(self) -> None:
        """All that this worker's optimizer did is in the weights, or was refused."""
        self._settle()
        workers = self._workers()
        if self._unsent and not self._rule.reads_first:
            refused = self._replica.offer(workers)
            if refused is not None:
                self._refuse(refused)
            else:
                self._exchange.add(self._layout.changing, self._scale(workers))
            self._unsent = 0
        while rest := self._replica.offer_rest():
            self._exchange.add(rest, self._scale(workers))

    def _adopt(self, pieces: Sequence[Piece]) -> None:
        self._replica.adopt(pieces)
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
            stacklevel=5,  # the caller of ParameterServer
        )
        self._adopt(self._layout.changing)

    def _workers(self) -> int:
        """That are alive, as far as is known."""
        self._roster.notice_deaths()
        return max(len(self._roster.active()), 1)

    def _scale(self, workers: int) -> Callable[[Piece], float]:
        return lambda piece: self._rule.scale(piece.kind, workers)
