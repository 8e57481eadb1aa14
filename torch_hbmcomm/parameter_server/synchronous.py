"""The synchronous parameter server: gather to the server, update there, broadcast.

The architecture of Woo, Choi and Lee 2020 (*Empirical performance analysis of collective
communication for distributed deep learning in a many-core CPU environment*) and of Lee et al. 2020
(*Communication optimization schemes for accelerating distributed deep learning systems*), over the
collectives of an ordinary process group: one rank owns the optimizer, the others send it gradients
and take its weights.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm.parameter_server.sync_agreement import Terms, agree
from torch_hbmcomm.parameter_server.sync_buckets import Bucket
from torch_hbmcomm.parameter_server.sync_channel import Channel
from torch_hbmcomm.parameter_server.sync_gradients import Gradients, average, prepare_averages
from torch_hbmcomm.parameter_server.sync_round import Call, Round, meet
from torch_hbmcomm.parameter_server.tensors import flat


class Synchronous:
    """One rank's end of a synchronous parameter server.

    An update is one of single-process training on the batches of all workers together: the server
    averages their gradients, in the order of the ranks, and runs its own optimizer.

    A parameter that has a gradient on some workers counts as zeros on the others; one that has
    none anywhere is left alone. Only what was updated travels back. A worker's own .grad stays as
    it is (the server's holds the average afterwards), so zero it before the next backward pass. To
    clip the average, register a step hook with the server's optimizer.

    When a gradient is not finite on any worker, nobody's is used: the update is left out, counted
    as "refused", and the first time warned of.

    Workers may take different numbers of steps: one that has closed brings nothing to an average
    from then on. Otherwise they call step() and pull() in the same order. Between two of these
    calls the group is free for other collectives, unless the server is dedicated: give it a group
    of its own then.

    Every method but state_dict() and stats() is a collective. When the server's update raises,
    every rank raises. Errors of the group itself (a dead rank, a timeout) come as they are, and
    leave this object unusable. Used from one thread.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        group: dist.ProcessGroup | None = None,
        server: int = 0,
        dedicated: bool = False,
        buffers: str = "shared",
        push_every: int = 1,
    ) -> None:
        """Everyone takes the server's parameters and buffers.

        Args:
            model: on the CPU, with the same parameters and buffers on every rank
            optimizer: the server's; those of other ranks are not used, and may be None
            group: any with all_gather, gather and broadcast; None means the default group
            server: a rank of the group
            dedicated: the server computes no gradients, and runs serve() instead of step()
            buffers: "shared": with an update everyone takes those of the server, or, when it
                brought no gradient, of the lowest rank that did; "local": each keeps its own
            push_every: steps whose gradients are averaged to one update; step() takes .grad away
                meanwhile

        Raises:
            ValueError: on every rank, naming the rank and what is wrong or differs
        """
        chosen = dist.group.WORLD if group is None else group
        if chosen is None:
            raise ValueError("there is no default group; call init_process_group first")
        self._group = chosen
        self._terms = Terms(server, dedicated, buffers, push_every)
        agree(self._group, self._terms, model, optimizer)
        self._model = model
        self._optimizer = optimizer
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        self._gradients = Gradients(self._parameters)
        total = sum(tensor.nbytes for tensor in self._weights_and_buffers())
        self._channel = Channel(self._group, server, total)
        self._closed = False
        self._updates = 0
        self._refused = 0
        self._gradient_bytes = 0
        self._weight_bytes = 0
        self._exchange_seconds = 0.0
        self._broadcast(self._weights_and_buffers())

    @property
    def _is_server(self) -> bool:
        return self._group.rank() == self._terms.server

    @property
    def _serves_only(self) -> bool:
        return self._is_server and self._terms.dedicated

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """After the backward pass, on every worker: one update, or its part of one.

        `closure` is called first, once, and may do the backward pass; what it returns is returned.

        Raises:
            TypeError: on every rank: a gradient is sparse
            RuntimeError: on every rank: the ranks call different methods, or the server's update
                failed (there: its own error)
        """
        self._check_works("step()")
        result = None if closure is None else closure()
        self._gradients.add()
        if self._gradients.batches < self._terms.push_every:
            self._gradients.release()
        else:
            self._round(Call.STEP)
        return result

    def serve(self, after_update: Callable[[], None] | None = None) -> None:
        """On a dedicated server: answers until all workers have closed.

        `after_update` is called after each update, while the workers wait: for learning-rate
        schedules, progress, checkpoints.
        """
        if not self._serves_only:
            raise RuntimeError(
                f"serve() is for a dedicated server; rank {self._group.rank()} is a worker "
                f"(server={self._terms.server}, dedicated={self._terms.dedicated})"
            )
        while not self._closed:
            self._round(Call.FOLLOW, after_update)

    def pull(self) -> None:
        """On every worker: takes the server's weights, and its buffers if they are shared."""
        self._check_works("pull()")
        self._round(Call.PULL)

    def state_dict(self) -> dict[str, Any]:
        """Keys: "model", "updates" and, on the server, "optimizer". Tensors are references, as in
        torch.nn.Module.state_dict()."""
        state: dict[str, Any] = {"model": self._model.state_dict(), "updates": self._updates}
        if self._is_server and self._optimizer is not None:
            state["optimizer"] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """On every rank, a dedicated server too (before it serves). The server loads its `state`,
        the others take its weights and buffers and leave theirs unread.

        The number of workers may differ from that of the run that saved it.

        Raises:
            ValueError: on the server: the state is not from a server
            RuntimeError: on the others, when the server could not load its state
        """
        if self._closed:
            raise RuntimeError("load_state_dict() after close()")
        self._gradients.clear()
        self._round(Call.LOAD, partial(self._load, state))

    def stats(self) -> dict[str, int | float]:
        """updates, refused (updates); gradient_bytes and weight_bytes that this rank sent or took;
        exchange_seconds spent in the methods, the server's updates included."""
        return {
            "updates": self._updates,
            "refused": self._refused,
            "gradient_bytes": self._gradient_bytes,
            "weight_bytes": self._weight_bytes,
            "exchange_seconds": self._exchange_seconds,
        }

    def close(self) -> None:
        """Sends what push_every has held back, then takes part in the others' rounds until all
        have closed. Not for a worker that failed: it would follow the others to their end."""
        if not self._closed and self._gradients.batches:
            self._round(Call.STEP)
        while not self._closed:
            self._round(Call.FOLLOW)

    # -- rounds ----------------------------------------------------------------------------------

    def _round(self, call: Call, on_server: Callable[[], None] | None = None) -> None:
        """on_server: what the server does after an update, or to load."""
        start = time.perf_counter()
        try:
            offer = self._gradients.offer(call)
            agreed = meet(self._group, self._terms.server, self._names, offer)
            if agreed.call == Call.FOLLOW:
                self._closed = True
            elif agreed.call == Call.PULL:
                self._broadcast(self._weights_and_shared_buffers())
            elif agreed.call == Call.LOAD:
                self._on_server(on_server)
                self._broadcast(self._weights_and_buffers())
            elif agreed.broken is not None:
                self._refuse(*agreed.broken)
            else:
                self._exchange(agreed, on_server)
        finally:
            if call == Call.STEP:
                self._gradients.clear()
            self._exchange_seconds += time.perf_counter() - start

    def _exchange(self, agreed: Round, after_update: Callable[[], None] | None) -> None:
        parameters = [self._parameters[index] for index in agreed.parameters]
        gradients = self._gradients.flats(agreed.parameters)
        rooms: list[torch.Tensor] = []
        if self._is_server:
            rooms = prepare_averages(self._parameters, agreed.parameters)

        def receive(bucket: Bucket, rows: list[torch.Tensor]) -> None:
            average(bucket, [rows[rank] for rank in agreed.workers], agreed.batches, rooms)

        self._gradient_bytes += self._channel.gather(gradients, parameters, receive)
        if self._terms.buffers == "shared":
            server = self._terms.server
            source = server if server in agreed.workers else agreed.workers[0]
            self._broadcast(list(self._model.buffers()), source)
        self._on_server(partial(self._update, after_update))
        self._broadcast(parameters)

    def _update(self, after_update: Callable[[], None] | None) -> None:
        assert self._optimizer is not None  # agree() saw to it
        self._optimizer.step()
        self._updates += 1
        if after_update is not None:
            after_update()

    def _load(self, state: Mapping[str, Any]) -> None:
        assert self._optimizer is not None
        for key in ("model", "optimizer", "updates"):
            if key not in state:
                raise ValueError(f"the state has no {key!r}; load one saved on the server's rank")
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = int(state["updates"])

    def _on_server(self, action: Callable[[], None] | None) -> None:
        """The server acts, and everyone learns whether it could."""
        failure: Exception | None = None
        if self._is_server and action is not None:
            try:
                action()
            except Exception as error:
                failure = error
        outcome = torch.tensor([failure is None, self._updates], dtype=torch.int64)
        dist.broadcast(outcome, group=self._group, group_src=self._terms.server)
        succeeded, self._updates = outcome.tolist()
        if failure is not None:
            raise failure
        if not succeeded:
            raise RuntimeError(
                f"the server (rank {self._terms.server}) failed after update {self._updates}; its "
                "own error says why"
            )

    def _refuse(self, rank: int, index: int) -> None:
        if self._refused == 0:
            warnings.warn(
                f"the gradient of parameter {self._names[index]} on rank {rank} is not finite; the "
                "update is left out on every rank, and later ones are counted without a warning",
                RuntimeWarning,
                stacklevel=5,  # the caller of ParameterServer.step()
            )
        self._refused += 1

    # -- tensors ---------------------------------------------------------------------------------

    def _broadcast(self, tensors: Sequence[torch.Tensor], source: int | None = None) -> None:
        source = self._terms.server if source is None else source
        flats = [flat(tensor) for tensor in tensors]
        self._weight_bytes += self._channel.broadcast(flats, source)

    def _weights_and_buffers(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    def _weights_and_shared_buffers(self) -> list[torch.Tensor]:
        shared = self._model.buffers() if self._terms.buffers == "shared" else ()
        return [*self._model.parameters(), *shared]

    def _check_works(self, method: str) -> None:
        if self._closed:
            raise RuntimeError(f"{method} after close()")
        if self._serves_only:
            raise RuntimeError(
                f"{method} on rank {self._group.rank()}, a dedicated server: it runs serve()"
            )
