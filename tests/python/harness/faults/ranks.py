"""A rank in a cell of the fault matrix.

It goes through the moments in order. At the cell's moment it sends "ready", and obeys the parent's
order. The messages to the parent are tuples that begin with a word:

    port N             rank 0 serves the store at this port
    ready N            the rank is at the cell's moment, after N operations
    turning N          after "ready" it has completed an operation, its Nth, and continues
    full KIND TEXT     an allocation failed with this error
    steps N            its N exchanges are complete; it waits for the other ranks' exchanges
    failed KIND TEXT T it had this error, at the time T of the monotonic clock
    checked N          its results are right; N is the parameter server's weight, 0 in other modes
    finished           it has destroyed its groups, and ends
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_group

from harness.box_process import TOKEN
from harness.faults.matrix import AT_WORK, Cell, Mode, Moment
from harness.network import enter_namespace

LONG_TIMEOUT = 60.0  # seconds, for operations that must not time out
_LARGE = 1 << 18  # elements: 1 MiB
_ROOM = 256 << 20  # bytes that a rank with full memory may still map: enough, except for a segment
BASE = 100_000.0  # an exchange of rank r adds BASE ** r to each weight


class DeliberateError(Exception):
    """The exception by which the victim ends."""


@dataclass(frozen=True)
class RankSetup:
    """The arguments of a rank's process.

    timeout: seconds for operations; begin: for init_process_group and new_group.
    box_timeout: seconds for operations on the box (None: no limit), and for attempts to reach it.
    host: the address at which rank 0 serves the store. box: the box's address, or empty.
    """

    cell: Cell
    rank: int
    size: int
    folder: Path
    host: str
    timeout: float
    begin: float
    box_timeout: float | None
    environment: dict[str, str] = field(default_factory=dict)
    network: str = ""  # the network namespace to be in
    box: str = ""
    transport: str = "shm"


class Work(ABC):
    """The operations of a mode, and the checks of their results."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup

    @abstractmethod
    def turn(self, number: int, stop: bool) -> bool:
        """Do an operation. Returns True if any rank that takes part in it passed stop=True."""

    @abstractmethod
    def save(self) -> None:
        """Save a checkpoint, on all ranks together."""

    def finish(self, all_done: Callable[[], None]) -> float:
        """Check the results of all turns. Returns the parameter server's weight, or 0.

        all_done: a function that returns when all ranks' turns are done.
        """
        return 0

    def close(self) -> None:
        """Release all resources except groups."""
        return

    def _file(self) -> Path:
        return self._setup.folder / f"checkpoint{self._setup.rank}"

    def _save(self, state: Any) -> None:
        """Save the state. The earlier checkpoint stays until the new checkpoint is complete."""
        half = self._file().with_suffix(".half")
        torch.save(state, half)
        os.replace(half, self._file())


class Collectives(Work):
    def turn(self, number: int, stop: bool) -> bool:
        setup = self._setup
        found = torch.arange(_LARGE) % 1000 * (setup.rank + number)
        factor = sum(rank + number for rank in range(setup.size))
        expected = torch.arange(_LARGE) % 1000 * factor
        found[0] = stop
        dist.all_reduce(found)
        assert torch.equal(found[1:], expected[1:]), f"turn {number} gave another sum"
        return bool(found[0] > 0)

    def save(self) -> None:
        if self._setup.rank == 0:
            self._save({"turn": torch.ones(_LARGE)})
        dist.barrier()


class Hook(Work):
    def __init__(self, setup: RankSetup) -> None:
        from torch_hbmcomm import LayerDrop, LayerDropState, layer_drop_hook

        super().__init__(setup)
        self._model = _Weighted()
        self._ddp = nn.parallel.DistributedDataParallel(self._model, bucket_cap_mb=0.02)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1.0)
        self._state = LayerDropState(self._ddp, LayerDrop(ratio=0.5, every=2))
        self._ddp.register_comm_hook(self._state, layer_drop_hook)
        self._expected = [torch.zeros_like(one) for one in self._model.all]

    def turn(self, number: int, stop: bool) -> bool:
        size = self._setup.size
        factors = [size * ((rank + 1) * number % 7) for rank in range(size)]
        self._optimizer.zero_grad()
        self._ddp(float(factors[self._setup.rank])).backward()
        self._optimizer.step()
        for index, expected in enumerate(self._expected):
            expected -= (index + 1) * sum(factors) // size
        stopping = torch.tensor([float(stop)])
        dist.all_reduce(stopping)
        return bool(stopping[0] > 0)

    def save(self) -> None:
        self._save(self._state.state_dict())
        dist.barrier()

    def finish(self, all_done: Callable[[], None]) -> float:
        self._state.drain(self._optimizer)
        for found, expected in zip(self._model.all, self._expected, strict=True):
            assert torch.equal(found.detach(), expected), "a gradient was lost, or counted twice"
        return 0


class _Weighted(nn.Module):
    """A model whose gradients are `factor` times 1, 2, 3, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape) for shape in [(64, 64), (100, 50), (7,)])

    def forward(self, factor: float) -> torch.Tensor:
        parts = [(index + 1) * factor * one.sum() for index, one in enumerate(self.all)]
        return torch.stack(parts).sum()


class Asynchronous(Work):
    """Each exchange of rank r adds BASE ** r to every element of the weights."""

    def __init__(self, setup: RankSetup) -> None:
        from torch_hbmcomm import ParameterServer, smb
        from torch_hbmcomm.parameter_server import Downpour

        super().__init__(setup)
        self._box = smb.connect(
            setup.box,
            TOKEN,
            transport=setup.transport,  # type: ignore[arg-type]
            reconnect_timeout=setup.box_timeout or LONG_TIMEOUT,
            timeout=setup.box_timeout,
        )
        self._model = nn.Linear(40_000, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self._model.weight.zero_()
        self._server = ParameterServer(
            self._model,
            torch.optim.SGD(self._model.parameters(), lr=1.0),
            box=self._box,
            rule=Downpour("sum"),
            overlap=False,
            name=setup.cell.name,
            workers=setup.size,
            timeout=LONG_TIMEOUT,
        )
        self._turns = 0

    def turn(self, number: int, stop: bool) -> bool:
        weight = self._model.weight
        weight.grad = torch.full_like(weight, -(BASE**self._setup.rank))
        self._server.step()
        self._turns += 1
        return stop

    def save(self) -> None:
        if self._setup.rank == 0:
            self._save(self._server.state_dict())

    def finish(self, all_done: Callable[[], None]) -> float:
        all_done()
        self._server.pull()
        weight = self._model.weight.detach()
        assert (weight == weight[0, 0]).all(), "an exchange was added in part"
        return float(weight[0, 0])

    @property
    def turns(self) -> int:
        return self._turns

    def close(self) -> None:
        try:
            self._server.close()
        finally:
            self._box.close()


WORKS: dict[Mode, type[Work]] = {
    Mode.COLLECTIVES: Collectives,
    Mode.ASYNCHRONOUS: Asynchronous,
    Mode.HOOK: Hook,
}


class Rank:
    def __init__(self, pipe: Connection, setup: RankSetup) -> None:
        self._pipe = pipe
        self._setup = setup
        self._turns = 0
        self._stop = False
        self._work: Work | None = None
        self._idle: Any = None  # a client of the box in modes that do not use the box

    def run(self) -> None:
        """Go through all moments. Raises DeliberateError.

        Any other error ends the work, and is reported to the parent.
        """
        try:
            self._begin()
            self._train()
            self._leave_groups()
        except DeliberateError:
            raise
        except Exception as error:
            self._say("failed", type(error).__name__, str(error), time.monotonic())
            while self._pipe.recv() != "leave":  # the parent sends it when all have their errors
                pass
            if self._work is not None:
                with contextlib.suppress(Exception):  # the rank has reported its error
                    self._work.close()
            if dist.is_initialized():
                dist.destroy_process_group()

    def _begin(self) -> None:
        setup = self._setup
        store = self._meet()
        if setup.box and setup.cell.mode is not Mode.ASYNCHRONOUS:
            from torch_hbmcomm import smb

            seconds = setup.box_timeout
            self._idle = smb.connect(
                setup.box, TOKEN, reconnect_timeout=seconds or LONG_TIMEOUT, timeout=seconds
            )
            self._idle.alloc(4096, temporary=True).write()
        self._gate(Moment.INIT)
        dist.init_process_group(
            "hbm",
            store=store,
            rank=setup.rank,
            world_size=setup.size,
            timeout=timedelta(seconds=setup.begin),
        )
        _get_default_group().set_timeout(timedelta(seconds=setup.timeout))
        if setup.cell.mode is Mode.ASYNCHRONOUS:  # connecting to the box is a part of the start
            self._work = WORKS[setup.cell.mode](setup)
        self._gate(Moment.NEW_GROUP)
        group = dist.new_group(timeout=timedelta(seconds=setup.begin))
        _get_default_group().set_timeout(timedelta(seconds=setup.timeout))
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total == setup.size
        if self._work is None:
            self._work = WORKS[setup.cell.mode](setup)

    def _train(self) -> None:
        assert self._work is not None
        self._gate(Moment.BEFORE)
        self._turn()
        if self._setup.cell.moment is Moment.DURING:
            self._gate(Moment.DURING)
            self._say("turning", self._turns)
            while not self._turn():
                if self._pipe.poll():
                    self._obey()
        self._gate(Moment.AFTER)
        self._turn()
        self._gate(Moment.CHECKPOINT)
        self._work.save()
        found = self._work.finish(self._await_others)
        self._say("checked", found)

    def _leave_groups(self) -> None:
        assert self._work is not None
        self._gate(Moment.DESTROY)
        self._work.close()
        dist.destroy_process_group()
        self._gate(Moment.EXIT)
        self._say("finished")

    def _turn(self) -> bool:
        assert self._work is not None
        self._turns += 1
        return self._work.turn(self._turns, self._stop)

    def _meet(self) -> Store:
        """Return the store; rank 0 serves it."""
        setup = self._setup
        timeout = timedelta(seconds=LONG_TIMEOUT)
        if setup.rank == 0:
            served = TCPStore(
                setup.host, 0, setup.size, is_master=True, timeout=timeout, wait_for_workers=False
            )
            self._say("port", served.port)
            return served
        port = self._pipe.recv()
        return TCPStore(setup.host, port, setup.size, is_master=False, timeout=timeout)

    def _gate(self, moment: Moment) -> None:
        if moment is self._setup.cell.moment:
            self._say("ready", self._turns)
            self._obey()

    def _obey(self) -> None:
        order = self._pipe.recv()
        if order == "raise":
            raise DeliberateError("raises as requested")
        if order == "exit":
            sys.exit(0)
        if order == "stop":
            self._stop = True
        if order == "fill":
            self._fill()

    def _fill(self) -> None:
        """Limit this process's address space.

        At a moment in AT_WORK, also ask for more memory than the machine has.
        """
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, resource.RLIM_INFINITY))
        if self._setup.cell.moment not in AT_WORK:
            return
        from torch_hbmcomm import memory

        try:
            memory.empty(1 << 40)
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._say("full", type(error).__name__, str(error))

    def _await_others(self) -> None:
        assert isinstance(self._work, Asynchronous)
        self._say("steps", self._work.turns)
        while self._pipe.recv() != "all done":
            pass

    def _say(self, *message: Any) -> None:
        self._pipe.send(message)


def run_rank(pipe: Connection, setup: RankSetup) -> None:
    """Run a rank in this process, with its output in a file."""
    output = os.open(setup.folder / f"rank{setup.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(setup.environment)
    if setup.network:
        enter_namespace(setup.network)
    torch.set_num_threads(1)
    try:
        Rank(pipe, setup).run()
    finally:
        atexit._run_exitfuncs()  # children of multiprocessing skip exit handlers


def run_client(pipe: Connection, box: str) -> None:
    """Accumulate on the box in an endless loop, as a client in its own process."""
    from torch_hbmcomm import smb

    with smb.connect(box, TOKEN) as connected:
        sum_, term = (connected.alloc(1 << 20, temporary=True) for _ in range(2))
        sum_.accumulate(term, "float32")
        pipe.send("connected")
        while True:
            sum_.accumulate(term, "float32")
            time.sleep(0.001)
