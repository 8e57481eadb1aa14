"""The parameter server as a training script sees it: a front of the two modes."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm.agreement import together
from torch_hbmcomm.groups import chosen_group
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.parameter_server.asynchronous import AsyncParameterServer
from torch_hbmcomm.parameter_server.config import BUFFERS, AsyncConfig, SyncConfig
from torch_hbmcomm.parameter_server.own_steps import OwnSteps
from torch_hbmcomm.parameter_server.rules import Rule, named
from torch_hbmcomm.parameter_server.sharding import Boxes
from torch_hbmcomm.parameter_server.shared_model import group_with_a_stranger
from torch_hbmcomm.parameter_server.synchronous import SyncParameterServer


class ParameterServer:
    """Train one model by several workers that share its weights.

        ps = hbmcomm.ParameterServer(model, optimizer)  # instead of DistributedDataParallel
        for batch, target in data:
            optimizer.zero_grad()
            loss(model(batch), target).backward()
            ps.step()  # instead of optimizer.step()

    **mode="async"**: the weights lie in one memory box or several. In step() the local optimizer
    steps, the difference is added to the weights on the box, and fresh weights are read back (Ahn
    et al. 2018; Dean et al. 2012). No worker waits for another, and the others go on when one dies.
    At the start the first worker's model becomes the weights, and every other worker, however late,
    takes the weights that it finds.

    Args:
        model: dense CPU parameters and buffers. Parameters that require a gradient are trained;
            all else is handed out once, at the start.
        optimizer: any of PyTorch's over the model's parameters; its state is each worker's own
        box: addresses or connections of the boxes that have the weights, the same for all workers
            in the same order; None: those of the group (Options(parameter_server=...))
        staleness: how many exchanges a worker may be ahead of the slowest live one (Ho et al.
            2013); None: any number. A worker that dies counts until its lease ends. With 0, plain
            SGD and Downpour the result is that of synchronous training; with other optimizers, that
            of averaging the workers' local updates.
        push_every: steps between two exchanges
        rule: "downpour", "easgd" (Zhang et al. 2015), or an object of parameter_server.rules
        transfer: torch.bfloat16: float32 differences and weights travel as that. What rounding
            leaves of a difference is sent with the next; the box's weights stay float32.
        buffers: "shared": floating-point buffers (BatchNorm's statistics) are averaged as
            parameters are; "local": each worker has its own. Integer buffers are always local.
        overlap: exchanges run beside the next step's computation, and bring weights that are one
            step older; None: yes, unless staleness is 0 or layers are dropped. Without, fresh
            weights are there when step() returns.
        drop: layers with small changes are sent later, and what nobody sent does not travel back
            (Lee et al. 2020); in both modes each worker decides alone. None: everything is sent.
        name: of this job in the boxes, if box is given; workers of one name train one model
        workers: wait for so many at the start; None: the group's size, or 1
        keep: the weights stay in the boxes when the last worker leaves; a job of the same name then
            goes on with them
        timeout: seconds to wait for other workers

    **mode="sync"**: gradients are gathered at rank `server` of `group`, whose optimizer steps, and
    the parameters are broadcast (synchronous.py), all over the group's own collectives.

    Args:
        group: None is the default one
        server: rank in the group
        dedicated: that rank does not train, and calls serve() instead of step()

    Without `box` it is a collective: if one rank's arguments are wrong, each other rank has
    RuntimeError with that rank's text, and the group continues.

    Raises:
        ValueError: arguments that do not go together, or a model that is not the other workers'
        TypeError: tensors that are not dense or not on the CPU
        MemoryError: a box is too small; says how much is needed
        TimeoutError: others did not come within `timeout`
        smb.BoxError: from a box. After an error in step() the object can only be closed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        mode: Literal["async", "sync"] = "async",
        box: Boxes | None = None,
        staleness: int | None = None,
        push_every: int = 1,
        *,
        rule: str | Rule = "downpour",
        transfer: torch.dtype | None = None,
        buffers: Literal["shared", "local"] = "shared",
        overlap: bool | None = None,
        name: str = "parameter-server",
        workers: int | None = None,
        keep: bool = False,
        group: dist.ProcessGroup | None = None,
        server: int = 0,
        dedicated: bool = False,
        timeout: float = 300.0,
        drop: LayerDrop | None = None,
    ) -> None:

        def check() -> AsyncConfig | SyncConfig:
            """Check this rank's arguments, as far as one rank can."""
            if buffers not in BUFFERS:
                raise ValueError(f'buffers is "shared" or "local", not {buffers!r}')
            if mode == "sync":
                others = (box, staleness, transfer, overlap, workers, keep or None)
                if rule != "downpour" or any(value is not None for value in others):
                    raise ValueError(
                        "box, staleness, rule, transfer, overlap, workers and keep belong to "
                        'mode="async"; mode="sync" works over the group\'s collectives'
                    )
                return SyncConfig(server, dedicated, buffers, push_every, drop)
            if mode != "async":
                raise ValueError(f'mode is "async" or "sync", not {mode!r}')
            if optimizer is None or dedicated or server:
                raise ValueError(
                    'in mode="async" every worker has an optimizer, and the box serves'
                )
            if box is not None and group is not None:
                raise ValueError("give box, or a group that has boxes, not both")
            if box is None and not dist.is_initialized():
                raise ValueError("there is no process group: give box, or form a group with a box")
            _check_optimizer(model, optimizer)
            size = 1 if box is not None else dist.get_world_size(group)
            return AsyncConfig(
                rule=named(rule),
                staleness=staleness,
                push_every=push_every,
                transfer=transfer,
                shared_buffers=buffers == "shared",
                overlap=staleness != 0 and drop is None if overlap is None else overlap,
                workers=size if workers is None else workers,
                keep=keep,
                timeout=timeout,
                drop=drop,
            )

        alone = box is not None and group is None and mode != "sync"
        if alone or not dist.is_initialized():
            config = check()
        else:
            config = _check_together(chosen_group(group), check)
        self._worker: AsyncParameterServer | SyncParameterServer
        if isinstance(config, SyncConfig):
            self._worker = SyncParameterServer(model, optimizer, config, group)
        else:
            assert optimizer is not None  # check() saw to it
            self._worker = AsyncParameterServer(model, optimizer, config, name, box, group)
        self._steps = OwnSteps(optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer, and share the update; after backward(). Returns what closure returns.

        An update that is not finite is left out and counted (stats()["refused"]), and a
        RuntimeWarning names the parameter; in mode="async" this worker alone leaves it out, and
        goes on with the box's weights.

        Until close() the optimizer's own step() raises RuntimeError.
        """
        with self._steps.allowed():
            return self._worker.step(closure)

    def pull(self) -> None:
        """Send what was not sent yet, and make the box's weights the model's, without rounding.

        With "easgd" these are the center.
        """
        self._worker.pull()

    def finish(self) -> None:
        """Send what was not sent yet, and count no more; after the last step of mode="async".

        No bound on staleness holds up the others then. pull() and state_dict() go on working.
        """
        if not isinstance(self._worker, AsyncParameterServer):
            raise ValueError('finish() belongs to mode="async"; in mode="sync" call close()')
        self._worker.finish()

    def serve(self, after_update: Callable[[], None] | None = None) -> None:
        """Run the dedicated server of mode="sync"; returns when all workers have closed."""
        if not isinstance(self._worker, SyncParameterServer):
            raise ValueError('serve() belongs to mode="sync"; the asynchronous mode has a box')
        with self._steps.allowed():
            self._worker.serve(after_update)
        self._steps.release()

    def state_dict(self) -> dict[str, Any]:
        """Return what to save: under "model" the weights by name, as the model's own state_dict()
        has them.

        In mode="async" any worker may save, and optimizers, which are each worker's own, are saved
        apart; in mode="sync" the server saves, its optimizer too.
        """
        return self._worker.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what was saved, on every worker before its first step.

        The state may come from another number of workers. In mode="async" the first that comes
        writes the weights to the box, unless training has begun there; in mode="sync" it is a
        collective, and the server's state counts.
        """
        self._worker.load_state_dict(state)

    def stats(self) -> dict[str, int | float]:
        """Return counters since the start.

        Both modes: refused updates, and exchange_seconds that the methods took beside the local
        optimizer. "async": steps; workers that are alive; ahead, the exchanges by which this worker
        leads the slowest; pushed_bytes and pulled_bytes. "sync": updates, gradient_bytes,
        weight_bytes.

        With drop: sent_layers, dropped_layers, and the threshold as it is now (-1: none); "sync"
        also gradient_bytes_undropped, of all gradients that this rank had, and oldest_age, the
        steps that the longest waiting layer has waited.
        """
        return self._worker.stats()

    def close(self) -> None:
        """Send what was not sent yet, and leave. The model keeps what it has.

        In mode="sync" it returns when all workers have closed.
        """
        try:
            with self._steps.allowed():
                self._worker.close()
        finally:
            self._steps.release()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; after an exception leave at once, and send nothing any more."""
        if kind is None:
            self.close()
            return
        self._steps.release()
        if isinstance(self._worker, AsyncParameterServer):
            self._worker.close(send=False)


def _check_together(
    group: dist.ProcessGroup, check: Callable[[], AsyncConfig | SyncConfig]
) -> AsyncConfig | SyncConfig:
    """Return this rank's check(), if no rank's raises and all have one mode. Collective."""
    own: list[AsyncConfig | SyncConfig] = []

    def attempt() -> str:
        own.append(check())
        return "sync" if isinstance(own[0], SyncConfig) else "async"

    modes = together(group, attempt)
    for rank, mode in enumerate(modes):
        if mode != modes[0]:
            raise ValueError(
                f'mode is "{modes[0]}" on rank 0 and "{mode}" on rank {rank}: it must be the same '
                "on every rank"
            )
    return own[0]


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if (index := group_with_a_stranger(model.parameters(), optimizer)) is not None:
        raise ValueError(
            f"group {index} of the optimizer has a parameter that is not the model's: it would "
            "not be shared"
        )
