"""Processes that form groups of changing members.

Each member is forked from the pools' warm process. It calls the functions that the test sends over
a pipe. `way` names how it reconfigures:

    again            torch_hbmcomm.reconfigure
    in place         PyTorch's torch.distributed._reconfigure (2.14 and later)
    instead of gloo  the same, in a program that asks for Gloo
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

import torch_hbmcomm
from harness.network import enter_namespace
from harness.pool import processes
from torch_hbmcomm.instead_of import take_the_place_of

LIMIT = 60.0  # seconds within which a member must answer
_IN_PLACE = hasattr(dist, "_reconfigure")
WAYS = ["again", *(["in place"] if _IN_PLACE else [])]
INSTEAD_OF_GLOO = ["instead of gloo"] if _IN_PLACE else []


@dataclass(frozen=True)
class Settings:
    """Settings of all members of a test.

    timeout: the timeout of their groups
    store: the file of the store that "in place" gives to init_process_group, which subgroups use
    networks: the network namespace of each node. A node without one is a name only.
    """

    way: str
    timeout: timedelta
    store: Path | None
    networks: Mapping[str, str]


class Member:
    """A process of the test's."""

    def __init__(self, settings: Settings, node: str) -> None:
        self._pipe, theirs = processes.Pipe()
        self.process: BaseProcess = processes.Process(target=_live, args=(theirs, settings, node))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def begin(self, act: Callable[..., Any], *arguments: Any) -> None:
        """Have the member call act(*arguments)."""
        self._pipe.send((act, arguments))

    def end(self) -> Any:
        """Return the result of the last call. An exception is returned, not raised."""
        assert self._pipe.poll(LIMIT), f"member {self.pid} said nothing in {LIMIT} s"
        return self._pipe.recv()

    def call(self, act: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(act, *arguments)
        return self.end()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.join()
        self._pipe.close()


class Members:
    """All processes of a test. A context manager: its end kills those that still run."""

    def __init__(
        self,
        way: str,
        timeout: float = LIMIT,
        store: Path | None = None,
        networks: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = Settings(way, timedelta(seconds=timeout), store, networks or {})
        self._all: list[Member] = []

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *error: object) -> None:
        for member in self._all:
            member.close()

    def start(self, nodes: str) -> list[Member]:
        """Start a member on each of these nodes: one letter for each."""
        made = [Member(self._settings, node) for node in nodes]
        self._all += made
        return made


def all_call(members: Sequence[Member], act: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Have all members call act(*arguments) together. Returns their results."""
    for member in members:
        member.begin(act, *arguments)
    return [member.end() for member in members]


def join(members: Sequence[Member], uuid: int) -> list[Any]:
    """Have the members form a group, in this order. Returns (rank, size) of each, or its error."""
    handles = [member.call(handle) for member in members]
    return all_call(members, reconfigure, uuid, handles)


def assert_joined(members: Sequence[Member], uuid: int) -> None:
    """Have the members form a group, and check the group."""
    count = len(members)
    assert join(members, uuid) == [(rank, count) for rank in range(count)]
    assert_right(members)


def assert_right(members: Sequence[Member]) -> None:
    """Check collectives and messages of the members' group."""
    assert all_call(members, exercise) == ["right"] * len(members)


def _live(pipe: Connection, settings: Settings, node: str) -> None:
    os.environ["HBMCOMM_NODE_ID"] = node
    if node in settings.networks:
        enter_namespace(settings.networks[node])
    torch.set_num_threads(1)
    _Own.settings = settings
    if settings.way != "again":
        if settings.way == "instead of gloo":
            take_the_place_of("gloo")
        file = settings.store
        dist.init_process_group(  # type: ignore[call-arg]
            "hbm" if settings.way == "in place" else "gloo",
            store=HashStore() if file is None else FileStore(str(file), -1),
            rank=0,
            world_size=1,
            timeout=settings.timeout,
            enable_reconfigure=True,
        )
    with suppress(EOFError):
        while True:
            act, arguments = pipe.recv()
            try:
                pipe.send(act(*arguments))
            except Exception as error:  # the test looks at it
                pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


class _Own:
    settings: Settings


# The functions that members call.


def handle() -> str:
    if _Own.settings.way == "again":
        return torch_hbmcomm.reconfigure_handle()
    text: str = dist._get_reconfigure_handle()  # type: ignore[attr-defined]
    return text


def reconfigure(
    uuid: int, handles: Sequence[str] | Collection[str], timeout: float | None = None
) -> tuple[int, int]:
    limit = _Own.settings.timeout if timeout is None else timedelta(seconds=timeout)
    if _Own.settings.way == "again":
        torch_hbmcomm.reconfigure(uuid, handles, limit)  # type: ignore[arg-type]
    else:
        dist._reconfigure(uuid, handles, timeout=limit).wait()  # type: ignore[attr-defined]
    return dist.get_rank(), dist.get_world_size()


def exercise() -> str:
    """Call collectives and exchange messages with every rank. Check the results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 3, 70_000):
        data = torch.arange(count, dtype=torch.float64) + rank
        dist.all_reduce(data)
        assert torch.equal(
            data, torch.arange(count, dtype=torch.float64) * size + size * (size - 1) / 2
        )
        shared = torch.full((count,), float(rank))
        dist.broadcast(shared, size - 1)
        assert (shared == size - 1).all()
        parts = [torch.empty(count) for _ in range(size)]
        dist.all_gather(parts, torch.full((count,), float(rank)))
        assert all((part == r).all() for r, part in enumerate(parts))
        works = []
        received = {r: torch.empty(count) for r in range(size) if r != rank}
        for r, into in received.items():
            works.append(dist.irecv(into, r))
            works.append(dist.isend(torch.full((count,), 100.0 * rank + r), r))
        for work in works:
            assert work is not None
            work.wait()
        assert all((data == 100 * r + rank).all() for r, data in received.items())
    return "right"


def all_reduce(count: int = 1000) -> float:
    data = torch.ones(count)
    dist.all_reduce(data)
    return float(data[0])
