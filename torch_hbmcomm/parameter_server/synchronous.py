"""The synchronous parameter server: gather to the server, update there, broadcast.

One rank, the server, owns the optimizer. The other ranks send gradients to the server and take its
weights, by the collectives of an ordinary process group. Woo, Choi and Lee 2020 describe this
architecture (*Empirical performance analysis of collective communication for distributed deep
learning in a many-core CPU environment*). So do Lee et al. 2020 (*Communication optimization
schemes for accelerating distributed deep learning systems*).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm.agreement import together
from torch_hbmcomm.groups import chosen_group
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.parameter_server.checkpoint import check_kind, count, part, restored_on_error
from torch_hbmcomm.parameter_server.config import SyncConfig
from torch_hbmcomm.parameter_server.late_momentum import Arrived, late_momentum, warn_of_loss
from torch_hbmcomm.parameter_server.own_steps import OwnSteps
from torch_hbmcomm.parameter_server.shared_model import SharedModel
from torch_hbmcomm.parameter_server.sync_agreement import (
    SyncCall,
    SyncRound,
    agree,
    meet,
)
from torch_hbmcomm.parameter_server.sync_channel import SyncChannel
from torch_hbmcomm.parameter_server.sync_drop import SyncLayerDrop, prepare_drop_state
from torch_hbmcomm.parameter_server.sync_gradients import GradientGather, Gradients, check_averages
from torch_hbmcomm.tensors import flat

_SAVED = "one saved on the server's rank"


class SyncParameterServer:
    """Train one model by several workers; the optimizer and its state are on one rank only.

        ps = hbmcomm.SyncParameterServer(model, optimizer)  # instead of DistributedDataParallel
        for batch, target in data:
            optimizer.zero_grad()
            loss(model(batch), target).backward()
            ps.step()  # instead of optimizer.step()
        ps.close()

    An update is the same as in a single process that trains on the batches of all workers together.
    The server averages the workers' gradients, in the order of the ranks, and runs its own
    optimizer.

    If a parameter has a gradient on some workers only, the gradients of other workers count as
    zeros. A parameter without any gradient is not updated, and only updated parameters are sent
    back. After an update a worker's .grad is unchanged, and the server's .grad has the average. So
    zero .grad before the next backward pass. To clip the average, register a step hook with the
    server's optimizer.

    If a worker's gradient is not finite, the update is left out on all ranks and counted as
    "refused". A RuntimeWarning reports the first such update.

    With `drop` every worker sends only the layers that it chooses. In the other layers its
    gradients count as zeros. It adds them up for later, except the gradients of refused updates.
    With SGD's momentum, late layers make up for the momentum that they missed. Still, training may
    lose accuracy: in docs/parameter-server.md 1.4 points at R = 0.9, and 7 at R = 0.95.
    ParameterServer lost at most 0.4. From R = 0.9 on a RuntimeWarning on the server says so.

    Workers may take different numbers of steps: a closed worker adds nothing to later averages.
    Until they close, workers call step() and pull() in the same order. Between two of these calls
    the group is free for other collectives. With a dedicated server it is not, because serve() uses
    the group all the time: give the object a group of its own.

    Every method except state_dict() and stats() is a collective; with `push_every`, step() is one
    only when it makes an update. The constructor is a collective, too: it copies the server's
    parameters and buffers to every rank. When the server's update raises, every rank raises. Errors
    of the group itself (a dead rank, a timeout) are raised unchanged, and leave this object
    unusable.

    Threads: one.

    Until close() the optimizers' own step() raises RuntimeError.

    Args:
        model: a model on the CPU, with the same parameters and buffers on every rank
        optimizer: the server's optimizer; other ranks' optimizers are not used, and may be None
        group: any group with all_gather, gather and broadcast, and with `drop` send and recv; None:
            the default group
        server: a rank of the group
        dedicated: True: the server computes no gradients, and runs serve() instead of step()
        buffers: "shared": with an update every rank takes the server's buffers. If the server is
            dedicated or has closed, every rank takes the buffers of the first worker that has not
            closed. "local": each rank keeps its own
        push_every: steps whose gradients are averaged to one update; in between, step() sets .grad
            to None
        drop: the rule of layers that wait; None: everything is sent

    Raises:
        ValueError: on every rank: models or arguments differ; the text names a rank.
        ValueError, TypeError: this rank's arguments or model are wrong.
        RuntimeError: another rank's arguments or model are wrong; has that rank's text. The group
            stays usable.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        group: dist.ProcessGroup | None = None,
        server: int = 0,
        dedicated: bool = False,
        buffers: Literal["shared", "local"] = "shared",
        push_every: int = 1,
        drop: LayerDrop | None = None,
    ) -> None:
        self._group = chosen_group(group)
        self._config = config = SyncConfig(server, dedicated, buffers, push_every, drop)
        specs = agree(self._group, config, model, optimizer)
        self._model = model
        self._optimizer = optimizer
        if config.buffers == "local":
            specs = [
                replace(one, kind="constant") if one.kind == "buffer" else one for one in specs
            ]
        self._shared = SharedModel(model, optimizer if self._is_server else None, specs)
        named = dict(model.named_parameters())
        self._names = list(named)
        self._parameters: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._find(everything=True)
        self._gradients = Gradients(self._parameters)
        total = sum(tensor.nbytes for tensor in self._weights_and_buffers())
        self._channel = SyncChannel(self._group, config.server, total)
        self._dropping = None
        if config.drop is not None:
            after_server = config.dedicated and self._group.rank() > config.server
            number = self._group.rank() - after_server
            workers = self._group.size() - config.dedicated
            self._dropping = SyncLayerDrop(config.drop, named, number, workers)
        self._gatherer = GradientGather(
            self._group, config, self._parameters, self._channel, self._dropping
        )
        self._flushed = config.drop is None or self._serves_only
        self._closed = False
        self._updates = 0
        self._refused = 0
        self._gradient_bytes = 0
        self._weight_bytes = 0
        self._exchange_seconds = 0.0
        self._broadcast(self._weights_and_buffers())
        self._own_steps = OwnSteps(optimizer)
        if self._is_server and optimizer is not None and drop is not None:
            warn_of_loss(optimizer, drop)

    @property
    def _is_server(self) -> bool:
        return self._group.rank() == self._config.server

    @property
    def _serves_only(self) -> bool:
        return self._is_server and self._config.dedicated

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update, or with `push_every` add this step's gradients to the next update.

        Call it after the backward pass, on every worker. Returns the closure's result.

        Args:
            closure: called first, once; it may do the backward pass. None: nothing is called.

        Raises:
            TypeError: on every rank: a gradient is sparse
            RuntimeError: on every rank: the ranks call different methods, a model has changed, or
                the server's update failed (the server itself raises the update's own error)
        """
        self._check_works("step()")
        result = None if closure is None else closure()
        self._gradients.add(self._changed())
        if self._gradients.batches < self._config.push_every:
            self._gradients.release()
        else:
            self._round(SyncCall.STEP)
        return result

    def serve(self, after_update: Callable[[], None] | None = None) -> None:
        """On a dedicated server, join the workers' calls until all workers have closed.

        Args:
            after_update: called after each update, while the workers wait: for learning-rate
                schedules, progress, checkpoints. None: nothing is called.
        """
        if not self._serves_only:
            raise RuntimeError(
                f"serve() is for a dedicated server; rank {self._group.rank()} is a worker "
                f"(server={self._config.server}, dedicated={self._config.dedicated})"
            )
        while not self._closed:
            self._round(SyncCall.FOLLOW, after_update)
        self._own_steps.release()

    def pull(self) -> None:
        """Take the server's weights, and its buffers if they are shared. Call it on every
        worker."""
        self._check_works("pull()")
        self._round(SyncCall.PULL)

    def state_dict(self) -> dict[str, Any]:
        """Return "model" and "updates". The server's state also has "optimizer". With `drop`, each
        worker's state also has "drop", its residuals. Tensors are references, as in
        torch.nn.Module.state_dict(), except copies in "drop"."""
        state: dict[str, Any] = {"model": self._model.state_dict(), "updates": self._updates}
        if self._is_server and self._optimizer is not None:
            state["optimizer"] = self._optimizer.state_dict()
        if self._dropping is not None and not self._serves_only:
            state["drop"] = self._dropping.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint on every rank, on a dedicated server too (before it serves).

        The server loads its `state`. The other ranks take the server's weights and buffers, and
        read only "drop" of their own state. A worker whose state has no "drop" has no residuals.

        The number of workers may differ from the run that saved the checkpoint. If it differs,
        "drop" must be a sequence of all former workers' "drop", on every worker. The residuals are
        distributed over the workers, and their sum stays the same.

        If one rank cannot load, every rank raises, and no rank has loaded anything.

        Raises:
            ValueError: on the server, for a state that is not a server's.
            ValueError: on a worker, for another model's "drop", or for any "drop" if this object
                was made without `drop`.
            ValueError: for the state of a ParameterServer.
            TypeError: for a state that is no mapping.
            RuntimeError: on the server, for another model's weights.
            RuntimeError: on the other ranks, with the text of the rank that cannot load.
        """
        if self._closed:
            raise RuntimeError("load_state_dict() after close()")
        self._gradients.clear()
        self._round(SyncCall.LOAD, state=state)

    def stats(self) -> dict[str, int | float]:
        """Return counters: updates; refused (updates); gradient_bytes and weight_bytes, which this
        rank sent or received; exchange_seconds, the time in this object's methods, which includes
        the server's updates.

        With `drop`, gradient_bytes are the sent bytes, and gradient_bytes_undropped the bytes of
        all gradients. sent_layers and dropped_layers are sums over all updates. threshold (-1:
        none) and oldest_age, the longest wait of a layer in steps, are present values."""
        counts = {
            "updates": self._updates,
            "refused": self._refused,
            "gradient_bytes": self._gradient_bytes,
            "weight_bytes": self._weight_bytes,
            "exchange_seconds": self._exchange_seconds,
        }
        return counts if self._dropping is None else counts | self._dropping.stats()

    def close(self) -> None:
        """Send the gradients that push_every holds back, then follow the other ranks' calls until
        all workers have closed. With `drop` a last update sends all residuals. Do not call it on a
        worker that failed: the call would last until the other workers close."""
        try:
            if not self._closed and self._gradients.batches:
                self._round(SyncCall.STEP)
            while not self._closed:
                self._round(SyncCall.FOLLOW if self._flushed else SyncCall.FLUSH)
        finally:
            self._own_steps.release()

    def __enter__(self) -> SyncParameterServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close. If the block raised, only release the optimizer, without joining a round."""
        if kind is None:
            self.close()
        else:
            self._own_steps.release()

    # -- rounds ----------------------------------------------------------------------------------

    def _round(
        self,
        call: SyncCall,
        on_server: Callable[[], None] | None = None,
        state: Any = None,
    ) -> None:
        """Exchange offers with the other ranks, and perform the common action.

        on_server: called on the server after an update
        state: the state to load
        """
        start = time.perf_counter()
        try:
            changed = self._changed(everything=call == SyncCall.LOAD)
            offer = self._gradients.offer(call, changed)
            agreed = meet(self._group, self._config.server, self._names, offer)
            if agreed.call == SyncCall.FOLLOW:
                self._closed = True
            elif agreed.call == SyncCall.PULL:
                self._broadcast(self._weights_and_shared_buffers())
            elif agreed.call == SyncCall.LOAD:
                self._load(state, follows=call != SyncCall.LOAD)
            elif agreed.broken is not None:
                self._refuse(*agreed.broken)
            else:
                self._exchange(agreed, on_server)
        finally:
            if call == SyncCall.STEP:
                self._gradients.clear()
            self._exchange_seconds += time.perf_counter() - start

    def _exchange(self, agreed: SyncRound, after_update: Callable[[], None] | None) -> None:
        gathered = self._gatherer.gather(agreed, self._gradients)
        self._gradient_bytes += gathered.nbytes
        parameters = [self._parameters[index] for index in gathered.parameters]
        if agreed.call == SyncCall.FLUSH:
            self._flushed = True
            if not parameters:
                return
        if self._config.buffers == "shared":
            server = self._config.server
            source = server if server in agreed.workers else agreed.workers[0]
            self._broadcast(self._buffers, source)
        arrived = list(zip(parameters, gathered.ages, strict=False))
        self._on_server(partial(self._update, arrived, after_update))
        self._broadcast(parameters)

    def _update(self, arrived: Sequence[Arrived], after_update: Callable[[], None] | None) -> None:
        assert self._optimizer is not None  # agree() has checked it
        if self._config.drop is not None:
            check_averages(self._names, self._parameters, self._config.drop.cache_dtype)
        with self._own_steps.allowed(), late_momentum(self._optimizer, arrived):
            self._optimizer.step()
        self._updates += 1
        if after_update is not None:
            after_update()

    def _load(self, state: Any, follows: bool) -> None:
        """Load on all ranks, or on none. follows: True: this rank has no state to load."""
        load_drop: Callable[[], None] | None = None

        def attempt() -> int:
            nonlocal load_drop
            self._find(everything=True)
            if not follows:
                check_kind(state, "SyncParameterServer", _SAVED)
                dropping = None if self._serves_only else self._dropping
                load_drop = prepare_drop_state(dropping, state.get("drop"))
            return self._load_at_server(state) if self._is_server else 0

        with restored_on_error(self._model, self._optimizer if self._is_server else None):
            self._updates = together(self._group, attempt)[self._config.server]
        self._broadcast(self._weights_and_buffers())
        if load_drop is not None:
            load_drop()

    def _load_at_server(self, state: Any) -> int:
        """Load the model and the optimizer. Returns the number of updates so far."""
        assert self._optimizer is not None  # agree() has checked it
        weights, optimizers = part(state, "model", _SAVED), part(state, "optimizer", _SAVED)
        updates = count(state, "updates", _SAVED)
        self._model.load_state_dict(weights)
        self._optimizer.load_state_dict(optimizers)
        return updates

    def _on_server(self, action: Callable[[], None] | None) -> None:
        """Run `action` on the server. If it raises, every rank raises."""
        failure: Exception | None = None
        if self._is_server and action is not None:
            try:
                action()
            except Exception as error:
                failure = error
        outcome = torch.tensor([failure is None, self._updates], dtype=torch.int64)
        dist.broadcast(outcome, group=self._group, group_src=self._config.server)
        succeeded, self._updates = outcome.tolist()
        if failure is not None:
            raise failure
        if not succeeded:
            raise RuntimeError(
                f"the server (rank {self._config.server}) failed after update {self._updates}; its "
                "own error says why"
            )

    def _refuse(self, rank: int, index: int) -> None:
        if self._refused == 0:
            warnings.warn(
                f"the gradient of parameter {self._names[index]} on rank {rank} is not finite; the "
                "update is left out on every rank, and later ones are counted without a warning",
                RuntimeWarning,
                stacklevel=4,  # the caller of step()
            )
        self._refused += 1

    # -- tensors ---------------------------------------------------------------------------------

    def _broadcast(self, tensors: Sequence[torch.Tensor], source: int | None = None) -> None:
        source = self._config.server if source is None else source
        flats = [flat(tensor) for tensor in tensors]
        self._weight_bytes += self._channel.broadcast(flats, source)

    def _find(self, everything: bool = False) -> None:
        """Find the model's tensors. Local buffers are empty tensors unless `everything`."""
        tensors = self._shared.find(everything)
        count = len(self._names)
        self._parameters[:], self._buffers[:] = tensors[:count], tensors[count:]

    def _changed(self, everything: bool = False) -> str | None:
        """Find the model's tensors. Returns the error that all ranks will raise, if the model has
        changed.
        """
        try:
            self._find(everything)
        except RuntimeError as error:
            return str(error)
        return None

    def _weights_and_buffers(self) -> list[torch.Tensor]:
        return [*self._parameters, *self._buffers]

    def _weights_and_shared_buffers(self) -> list[torch.Tensor]:
        shared = self._buffers if self._config.buffers == "shared" else ()
        return [*self._parameters, *shared]

    def _check_works(self, method: str) -> None:
        if self._closed:
            raise RuntimeError(f"{method} after close()")
        if self._serves_only:
            raise RuntimeError(
                f"{method} on rank {self._group.rank()}, a dedicated server: it runs serve()"
            )
