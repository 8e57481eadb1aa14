"""A worker of OuterSteps over boxes: an AsyncWorker whose exchange may run during several steps.

The outer weights are the weights in the boxes. A meeting is an exchange, so a worker waits for no
other worker, and the boxes add each delta exactly once. The outer optimizer is a rule. Each worker
keeps the momentum of its own deltas, so the outer step needs no lock and leaves nothing half done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.outer_steps.config import OuterConfig
from torch_hbmcomm.parameter_server import layout as layouts
from torch_hbmcomm.parameter_server.config import AsyncConfig
from torch_hbmcomm.parameter_server.exchange import Arrival
from torch_hbmcomm.parameter_server.layout import Shard, lay_out
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.replica import model_tensors
from torch_hbmcomm.parameter_server.rules import Downpour
from torch_hbmcomm.parameter_server.selection import SendAll
from torch_hbmcomm.parameter_server.shared_model import SharedModel
from torch_hbmcomm.parameter_server.worker import AsyncWorker, Exchanged, Plan
from torch_hbmcomm.pipeline import TaskPipeline
from torch_hbmcomm.tensors import check_fills_memory

_LEAST_SHARD = 64  # bytes


class DelayedNesterov(Downpour):
    """Move the outer weights by outer_lr / N times a delta with momentum, for N live workers.

    Liu et al. 2024 (*Asynchronous local-SGD training for language modeling*, algorithm 3) step a
    common momentum once in N deltas, by their mean. Here the momentum is the mean of the workers'
    momenta, each of which is stepped by its worker's deltas alone. If the N workers arrive in turn,
    the sum of N arrivals is the same in both.

    alpha: the part of the inner weights in the mix when a late exchange is applied; None: the outer
        weights plus the steps since the meeting
    """

    def __init__(self, outer_lr: float, momentum: float, alpha: float | None) -> None:
        super().__init__("mean")
        self._outer_lr = outer_lr
        self.momentum = momentum
        self._alpha = alpha

    def __repr__(self) -> str:
        return f"DelayedNesterov(outer_lr={self._outer_lr!r}, momentum={self.momentum!r})"

    def scale(self, kind: str, workers: int) -> float:
        mean = super().scale(kind, workers)
        return mean if kind == "buffer" else self._outer_lr * mean

    def take_unsent(self, local: torch.Tensor, base: torch.Tensor, fresh: torch.Tensor) -> None:
        if self._alpha is None:
            super().take_unsent(local, base, fresh)
        else:
            base.copy_(fresh)
            local.copy_(torch.lerp(base, local, self._alpha))


@dataclass(frozen=True)
class BoxConfig(AsyncConfig):
    """The arguments of OuterSteps, as a parameter server's worker takes them.

    fragments: equal on all workers, because the cuts of the shards depend on it
    delay: this worker's own
    """

    fragments: int
    delay: int

    @staticmethod
    def of(outer: OuterConfig, workers: int, keep: bool, timeout: float) -> BoxConfig:
        """Raises TypeError or ValueError for a wrong argument."""
        outer.check(1)
        if outer.dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"over boxes dtype is None or torch.bfloat16, not {outer.dtype}: a box adds deltas "
                "as wide as the parameters, and bfloat16"
            )
        return BoxConfig(
            rule=DelayedNesterov(outer.outer_lr, outer.momentum, outer.alpha),
            staleness=None,
            push_every=1,
            transfer=outer.dtype,
            buffers="shared",
            overlap=False,
            workers=workers,
            keep=keep,
            timeout=timeout,
            drop=None,
            aggregate=None,
            fragments=outer.fragments,
            delay=outer.delay,
        )

    @property
    def narrows_weights(self) -> bool:
        """False, because inner steps begin from these weights, and rounding them costs more than a
        rounded delta, whose error is sent later."""
        return False

    @property
    def manifest_terms(self) -> dict[str, Any]:
        return {**super().manifest_terms, "fragments": self.fragments}


class FragmentsInTurn(SendAll):
    """The selection of a worker that sends one fragment of the parameters at a time, and all
    buffers with each.

    Raises ValueError if there are fewer shards of parameters than fragments.
    """

    def __init__(self, changing: Sequence[Shard], fragments: int) -> None:
        super().__init__(changing)
        self._buffers = [shard for shard in changing if shard.kind != "parameter"]
        self._fragments = _cut(
            [shard for shard in changing if shard.kind == "parameter"], fragments
        )
        self._next = 0

    def choose(self, sums: Sequence[float]) -> Sequence[Shard]:
        chosen = [*self._fragments[self._next], *self._buffers]
        self._next = (self._next + 1) % len(self._fragments)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"]) % len(self._fragments)


def _cut(shards: Sequence[Shard], parts: int) -> list[list[Shard]]:
    """Cut shards into parts of about equally many bytes, of which none is empty."""
    if len(shards) < parts:
        raise ValueError(
            f"fragments={parts} is too many for a model that is cut into {len(shards)} shards, of "
            f"at least {_LEAST_SHARD} bytes each"
        )
    found: list[list[Shard]] = []
    rest = list(shards)
    for left in range(parts, 0, -1):
        share = sum(shard.size for shard in rest) / left
        taken, size = 0, 0
        while taken == 0 or (size + rest[taken].size / 2 <= share and len(rest) - taken >= left):
            size += rest[taken].size
            taken += 1
            if taken == len(rest):
                break
        if left == 1:
            taken = len(rest)
        found.append(rest[:taken])
        rest = rest[taken:]
    return found


def plan_of(model: nn.Module, config: BoxConfig, boxes: int) -> Plan:
    """Lay the model's tensors out, in shards that can be dealt to the fragments.

    Raises ValueError or TypeError for a tensor that a box cannot have.

    boxes: the number of boxes
    """
    tensors = model_tensors(model, shared_buffers=True)
    for name, tensor, kind in tensors:
        check_fills_memory(kind, name, tensor)
    specs = [TensorSpec.of(*one) for one in tensors]
    size = sum(tensor.nbytes for _, tensor, kind in tensors if kind == "parameter")
    most = min(layouts.SHARD_BYTES, max(-(-size // config.fragments), _LEAST_SHARD))
    layout = lay_out(specs, boxes, config.transfer_name, shard_bytes=most)
    selection = FragmentsInTurn(layout.changing, config.fragments)
    return Plan(SharedModel(model, None, specs), layout, selection, 0)


class OuterWorker(AsyncWorker):
    """An AsyncWorker whose exchange is applied when the program says so.

    Threads: one at a time. With a delay, a thread of its own runs the exchanges.
    """

    def __init__(self, boxes: Sequence[smb.Box], name: str, plan: Plan, config: BoxConfig) -> None:
        super().__init__(boxes, name, plan, config, plan.model)
        if config.delay:
            self._pipeline = self._resources.enter_context(TaskPipeline("hbm-outer-steps"))

    def land(self) -> None:
        """Apply the exchange that runs, if there is one: this worker's model becomes the outer
        weights plus its change since the exchange began."""
        with self._naming_process():
            self.wait_for_exchange()
        if self._arrived:
            self._replica.locate()
        for shard in self._arrived:
            self._replica.take_unsent(shard)
        self._arrived = ()

    def resume(
        self,
        outer: Sequence[torch.Tensor] | None,
        inner: Sequence[torch.Tensor],
        own: Mapping[str, Sequence[torch.Tensor]],
    ) -> None:
        """Load a checkpoint, together with the workers that the job began with.

        The first worker with a checkpoint writes its outer weights to the boxes. Each worker then
        has its own model again. If training has begun in the boxes, this worker takes their weights
        instead, and keeps its momentum.

        Args:
            outer: the outer weights, in the model's order; None: this worker has no checkpoint
            inner: the model's tensors
            own: a result of saved()
        """
        with self._naming_process():
            self._resume(outer, inner, own)

    def saved(self) -> dict[str, list[torch.Tensor]]:
        """Return copies of this worker's bases, momenta and rounding errors."""
        return self._replica.saved()

    @property
    def sent_bytes(self) -> int:
        """The bytes of deltas that this worker has sent."""
        return self._exchange.pushed_bytes

    @property
    def received_bytes(self) -> int:
        """The bytes of outer weights that exchanges have read."""
        return self._exchange.pulled_bytes

    @property
    def workers(self) -> int:
        """The number of workers believed alive at the last exchange, this one included."""
        return len(self._active)

    # -- inside ----------------------------------------------------------------------------------

    def _resume(
        self,
        outer: Sequence[torch.Tensor] | None,
        inner: Sequence[torch.Tensor],
        own: Mapping[str, Sequence[torch.Tensor]],
    ) -> None:
        membership = self._job.membership
        everything = self._layout.shards
        late = membership.begun()
        if outer is not None and not late:
            if membership.claims_load():
                copy_all(outer, self._replica.locate(everything=True))
                self._replica.give()
                membership.set_loaded()
            else:
                membership.wait_loaded()
        if not late:
            membership.wait_resumed(self._config.workers)
            if not membership.loads():
                raise ValueError(
                    "load_state_dict() was given None on every worker: no worker has a state"
                )
            membership.wait_loaded()
        self._adopt(everything)
        if outer is not None:
            self._replica.load(own, ("momentum",) if late else ("base", "momentum", "rest"))
            if not late:
                copy_all(inner, self._replica.locate(everything=True))

    def _exchange_now_or_overlapped(self) -> None:
        self.land()
        if self._pipeline is None:
            self._push_and_pull()
            return
        workers, scales = self._workers_and_scales()
        sent = self._fill_delta_buffers(workers)
        for shard in sent:
            self._replica.depart(shard)
        self._in_flight = self._pipeline.submit(
            partial(self._exchange.start, sent, scales), partial(self._end_exchange, sent)
        )

    def _end_exchange(self, sent: Sequence[Shard], arrivals: Iterable[Arrival]) -> Exchanged:
        """End the exchange. The next one reads the membership table when it begins, because many
        steps may lie between two exchanges."""
        return Exchanged(self._exchange.end(sent, arrivals))

    def _send_all(self) -> None:
        self.land()
        super()._send_all()


def copy_all(values: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each value into the tensor at its place."""
    with torch.no_grad():
        for value, tensor in zip(values, tensors, strict=True):
            tensor.copy_(value)
