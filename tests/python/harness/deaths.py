"""A job in which one rank ends or stops, and the errors of the others.

The ranks are forked from the pools' warm process. Each forms a group and repeats an operation until
the operation fails, because the victim dies or stops. The survivors then destroy their group and
exit normally.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import urlparse

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import _get_default_group

from harness.network import free_port
from harness.pool import processes

LIMIT = 120.0  # seconds, for a whole job
EXIT_SECONDS = 60.0

# Seconds from a death to an error: twenty times the bounds of docs/failures.md, 100 ms and 1 s.
SOON_ON_THE_NODE = 2.0
SOON_ELSEWHERE = 20.0

Call = Callable[[int, int], Any]  # arguments: the rank, and the number of ranks


@dataclass(frozen=True)
class Fate:
    """How the victim ends."""

    victim: int
    signal: signal.Signals = signal.SIGKILL
    turn: int | None = None  # ends before the operation with this number; None: at any time
    leaves_child: bool = False  # forks a child first, which outlives the victim
    executes: bool = False  # executes another program, and gets no signal: its process lives on


@dataclass(frozen=True)
class Survivor:
    rank: int
    kind: str  # name of the error's class
    text: str
    seconds: float  # from the victim's end to the error
    parting: float  # seconds that destroy_process_group took


@dataclass
class Job:
    """A job of ranks.

    layout: names each rank's node, as in harness.nodes
    timeout: for every operation except the first
    hurried: a rank whose timeout ends 50 ms before the others'
    """

    size: int
    layout: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    timeout: float = 60
    hurried: int | None = None

    def run(self, call: Call, fate: Fate, url: str = "") -> list[Survivor]:
        """Return the survivors by rank.

        url: address at which the ranks meet. By default this process serves a TCPStore, as
            torchrun's agent does, because in a FileStore a killed rank could leave half a record.

        Raises AssertionError if a survivor hangs, crashes, or exits with another code than 0.
        """
        store = None if url else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = f"tcp://127.0.0.1:{store.port}" if store else url
        ranks: list[BaseProcess] = []
        pipes: list[Connection] = []
        child = 0
        try:
            for rank in range(self.size):
                ours, theirs = processes.Pipe()
                process: BaseProcess = processes.Process(
                    target=_live, args=(theirs, self, rank, where, store is not None, call, fate)
                )
                process.start()
                theirs.close()
                ranks.append(process)
                pipes.append(ours)
            said = _first_words(ranks, pipes)
            ended, child = said.pop(fate.victim)
            found = [
                Survivor(rank, kind, text, at - ended, parting)
                for rank, (kind, text, at, parting) in sorted(said.items())
            ]
            for rank in sorted(said):
                ranks[rank].join(EXIT_SECONDS)
                assert ranks[rank].exitcode == 0, f"rank {rank} left with {ranks[rank].exitcode}"
            return found
        finally:
            for process in ranks:
                process.kill()
                process.join()
            if child:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def _first_words(ranks: list[BaseProcess], pipes: list[Connection]) -> dict[int, Any]:
    """Return the first message of each rank, by rank."""
    said: dict[int, Any] = {}
    deadline = time.monotonic() + LIMIT
    silent = dict(enumerate(pipes))
    while silent:
        ready = wait(list(silent.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in silent:
                print(f"rank {rank}:\n{_stacks(ranks[rank])}")
            pytest.fail(f"ranks {sorted(silent)} still ran after {LIMIT} s; the others: {said}")
        for rank, pipe in list(silent.items()):
            if pipe in ready:
                del silent[rank]
                try:
                    said[rank] = pipe.recv()
                except EOFError:
                    ranks[rank].join(EXIT_SECONDS)
                    code = ranks[rank].exitcode
                    raise AssertionError(
                        f"rank {rank} ended with code {code}; the others: {said}"
                    ) from None
    return said


def _stacks(process: BaseProcess) -> str:
    """Return the stacks of the process, if there is a debugger."""
    if shutil.which("gdb") is None:
        return ""
    command = ["gdb", "--batch", "-p", str(process.pid), "-ex", "thread apply all backtrace 24"]
    return subprocess.run(command, capture_output=True, text=True).stdout


def _live(
    pipe: Connection, job: Job, rank: int, url: str, is_served: bool, call: Call, fate: Fate
) -> None:
    os.environ.update(job.environment, TORCHELASTIC_USE_AGENT_STORE=str(is_served))
    if is_served:  # as torchrun's agent sets them; PyTorch 2.14 and later compare them with the url
        address = urlparse(url)
        os.environ.update(MASTER_ADDR=str(address.hostname), MASTER_PORT=str(address.port))
    if job.layout:
        os.environ["HBMCOMM_NODE_ID"] = job.layout[rank]
    torch.set_num_threads(1)
    patience = timedelta(seconds=LIMIT)  # a busy machine starts one rank long before another
    dist.init_process_group(
        "hbm", init_method=url, rank=rank, world_size=job.size, timeout=patience
    )
    call(rank, job.size)
    timeout = timedelta(seconds=job.timeout - (0.05 if rank == job.hurried else 0))
    _get_default_group().set_timeout(timeout)
    if rank == fate.victim and fate.turn is None:
        threading.Timer(0.3, _end, (pipe, fate)).start()
    for turn in count(2):
        if rank == fate.victim and turn == fate.turn:
            _end(pipe, fate)
        try:
            call(rank, job.size)
        except Exception as error:
            kind, text, seen = type(error).__name__, str(error), time.monotonic()
            break
    dist.destroy_process_group()
    pipe.send((kind, text, seen, time.monotonic() - seen))


def _end(pipe: Connection, fate: Fate) -> None:
    child = 0
    if fate.leaves_child:
        child = os.fork()
        if child == 0:
            time.sleep(LIMIT)
            os._exit(0)
    pipe.send((time.monotonic(), child))
    if fate.executes:
        os.execlp("sleep", "sleep", str(LIMIT))
    os.kill(os.getpid(), fate.signal)


def served_by_rank_0() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def report(survivors: list[Survivor]) -> None:
    for survivor in survivors:
        print(
            f"rank {survivor.rank} after {survivor.seconds * 1e3:.0f} ms, destroyed in "
            f"{survivor.parting * 1e3:.0f} ms: {survivor.kind}: {survivor.text}"
        )


def assert_notified(survivors: list[Survivor], victim: int, bound: float, operation: str) -> None:
    report(survivors)
    for survivor in survivors:
        assert survivor.kind == "DistBackendError", survivor
        assert re.search(operation, survivor.text), survivor
        assert re.search(rf"rank {victim} \(pid \d+ on \S+\) has died", survivor.text), survivor
        assert survivor.seconds < bound, survivor
        assert survivor.parting < bound, survivor
