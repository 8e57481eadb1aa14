"""Ways to train a model on several workers."""

from __future__ import annotations

import gc
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import torch_hbmcomm as hbmcomm
from benchmarks.namespaces import address
from papers.layer_drop.hooks import register
from torch_hbmcomm import smb

EVERY = 50  # steps between two meetings, by default
NAMES = ("plain", "low-rank", "outer", "boxes", "torchft")
_BOX_MEMORY = "256MiB"
_BOX_LEASE = 5.0  # seconds, as torchft's lighthouse awaits heartbeats
_TORCHFT_TIMEOUT = timedelta(seconds=60)


class Way(ABC):
    """How a worker steps, and communicates.

    forward: the module to compute the outputs with
    sent_bytes: that this worker has given to all_reduce
    """

    forward: nn.Module

    @property
    @abstractmethod
    def sent_bytes(self) -> int: ...

    @abstractmethod
    def step(self) -> None:
        """Step after the backward pass."""

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Put the weights that are the training's result into the model."""
        yield

    def heal(self, form_next_group: Callable[[], None]) -> None:
        """Continue without the dead worker, after the group's error."""
        raise RuntimeError(f"{type(self).__name__} has no way to continue after an error")

    def close(self) -> None:  # noqa: B027 -- most ways have nothing to end
        """End the training."""


class Ddp(Way):
    """DistributedDataParallel. terms: of LowRank; none: DDP without a hook."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, terms: Mapping[str, Any]) -> None:
        self._model, self._optimizer, self._terms = model, optimizer, dict(terms)
        self._sent_bytes = 0
        self._wrap()

    def _wrap(self) -> None:
        self.forward = DistributedDataParallel(self._model)
        self._hook = register(self.forward, "low_rank" if self._terms else "none", self._terms)

    def step(self) -> None:
        self._optimizer.step()
        if self._hook is None:
            self._sent_bytes += bytes_of(self._model)

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes + int(self._hook.summary()["sent_bytes"] if self._hook else 0)

    def heal(self, form_next_group: Callable[[], None]) -> None:
        """Wrap the model again. The hook's residuals are lost.

        REQUIRES: all survivors have taken equally many steps.
        """
        self._sent_bytes = self.sent_bytes
        self.forward, self._hook = self._model, None
        gc.collect()  # removes the hooks of the failed DDP from the parameters
        form_next_group()
        self._wrap()


class Outer(Way):
    """OuterSteps.

    terms: its arguments by name, with the name of `dtype` in torch; "pace": the program calls
        meet(), so that a slow worker may take fewer steps between two meetings
    stride: steps of the other workers for each of this one's
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, terms: Mapping[str, Any], stride: int
    ) -> None:
        self.forward, self._optimizer = model, optimizer
        self._terms = _arguments(terms)
        self._own_every = None
        if terms.get("pace"):
            self._own_every = self._terms["every"] // stride
            self._terms["every"] = None
        self._outer = self._made()

    def _made(self) -> hbmcomm.OuterSteps:
        return hbmcomm.OuterSteps(self.forward, self._optimizer, **self._terms)

    def step(self) -> None:
        self._optimizer.step()
        self._outer.step()
        if self._own_every is not None and self._outer.stats()["steps"] % self._own_every == 0:
            self._outer.meet()

    @property
    def sent_bytes(self) -> int:
        return self._outer.stats()["sent_bytes"]

    @contextmanager
    def weights(self) -> Iterator[None]:
        with self._outer.weights():
            yield

    def heal(self, form_next_group: Callable[[], None]) -> None:
        state = self._outer.state_dict()
        form_next_group()
        self._outer = self._made()
        self._outer.load_state_dict(state)

    def close(self) -> None:
        self._outer.close()


class OuterOverBox(Way):
    """OuterSteps over a memory box that rank 0 serves. No worker waits for another one.

    terms: arguments of OuterSteps by name
    stride: steps of the other workers for each of this one's; "every" counts the others' steps
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        terms: Mapping[str, Any],
        stride: int,
        meeting: Store,
    ) -> None:
        self.forward, self._optimizer = model, optimizer
        arguments = _arguments(terms)
        arguments["every"] //= stride
        if dist.get_rank() == 0:
            token = secrets.token_hex(16)
            # Serves until the next training begins, because other workers close later.
            self._server = smb.Server(
                f"{_own_address()}:0", _BOX_MEMORY, token=token, lease=_BOX_LEASE, verbs="off"
            )
            meeting.set("box", f"{self._server.url} {token}")
        url, token = meeting.get("box").decode().split()
        # Two emulated hosts share a file system, so the far one would find the box's shared memory.
        far = os.environ.get("HBMCOMM_NODE_ID", "0") != "0"
        self._outer = hbmcomm.OuterSteps(
            model,
            optimizer,
            box=smb.connect(url, token, "tcp" if far else "auto"),
            workers=dist.get_world_size(),
            **arguments,
        )

    def step(self) -> None:
        self._optimizer.step()
        self._outer.step()

    @property
    def sent_bytes(self) -> int:
        return self._outer.stats()["sent_bytes"]

    @contextmanager
    def weights(self) -> Iterator[None]:
        with self._outer.weights():
            yield

    def close(self) -> None:
        self._outer.close(wait=True)


class TorchftDiLoCo(Way):
    """torchft's DiLoCo over its ProcessGroupGloo: each worker is a replica group by itself.

    Rank 0 serves the lighthouse. terms: "every"
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, terms: Mapping[str, Any], meeting: Store
    ) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        self.forward, self._optimizer = model, optimizer
        rank, world = dist.get_rank(), dist.get_world_size()
        here = _own_address()
        self._lighthouse = None
        if rank == 0:
            # The lighthouse waits for slow workers, as long as they are alive.
            self._lighthouse = LighthouseServer(
                bind=f"{here}:0", min_replicas=1, join_timeout_ms=60_000
            )
            # address() has the machine's name, which other namespaces may not resolve to `here`.
            port = self._lighthouse.address().rpartition(":")[2]
            meeting.set("lighthouse", f"http://{here}:{port}")
        self._store = TCPStore(here, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=_TORCHFT_TIMEOUT), min_replica_size=1,
            load_state_dict=None, state_dict=None, use_async_quorum=False, init_sync=False,
            timeout=_TORCHFT_TIMEOUT, quorum_timeout=_TORCHFT_TIMEOUT, rank=0, world_size=1,
            store_addr=here, store_port=self._store.port, hostname=here,
            replica_id=f"worker_{rank}", lighthouse_addr=meeting.get("lighthouse").decode(),
        )  # fmt: skip
        # All register first: a quorum consists of the replicas that the lighthouse knows.
        meeting.set(f"ready {rank}", "")
        meeting.wait([f"ready {other}" for other in range(world)])
        outer = SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self._diloco = DiLoCo(
            self._manager, [model], optimizer, outer, sync_every=terms.get("every", EVERY)
        )
        self._diloco.__enter__()

    def step(self) -> None:
        self._optimizer.step()  # at its end DiLoCo meets, if it is time

    @property
    def sent_bytes(self) -> int:
        return int(self._manager.current_step()) * bytes_of(self.forward)

    def close(self) -> None:
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def way_of(
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    terms: Mapping[str, Any],
    stride: int,
    meeting: Store,
) -> Way:
    """Return a way by its name in NAMES. meeting: a fresh store of the workers"""
    if name == "outer":
        return Outer(model, optimizer, terms, stride)
    if name == "boxes":
        return OuterOverBox(model, optimizer, terms, stride, meeting)
    if name == "torchft":
        return TorchftDiLoCo(model, optimizer, terms, meeting)
    return Ddp(model, optimizer, {"ratio": 0.9} | dict(terms) if name == "low-rank" else {})


def _arguments(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of OuterSteps for the terms of a contender."""
    arguments = {"every": EVERY} | dict(terms)
    arguments.pop("pace", None)
    if "dtype" in arguments:
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    return arguments


def _own_address() -> str:
    """Return this worker's address: its end of the link, if there is one."""
    node = os.environ.get("HBMCOMM_NODE_ID")
    return "127.0.0.1" if node is None else address(int(node))


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of the model's gradients."""
    return sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
