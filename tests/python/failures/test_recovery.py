"""After a failure: another group in the same process, restarts, signals, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo, jobs
from harness.pool import processes
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

LIMIT = 90.0  # seconds, for a job
SOON = 10.0  # seconds, twenty times the bound of docs/failures.md for Ctrl-C
TRAINING = Path(jobs.JOB_SCRIPT).with_name("recovering.py")


def form(store: Path, rank: int, size: int, seconds: float = LIMIT) -> None:
    dist.init_process_group(
        "hbm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def total(rank: int) -> float:
    """Return the sum of all ranks' numbers, over tensors of one and of many elements."""
    found = []
    for count in (1, 200_000):
        data = torch.full((count,), rank + 1.0)
        dist.all_reduce(data)
        assert (data == data[0]).all()
        found.append(float(data[0]))
    assert found[0] == found[1]
    return found[0]


@contextmanager
def forked(
    size: int, live: Callable[..., None], *arguments: Any
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """Start processes that call live(pipe, rank, *arguments). Kill the processes at the end."""
    ranks: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(size):
            ours, theirs = processes.Pipe()
            process: BaseProcess = processes.Process(target=live, args=(theirs, rank, *arguments))
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        yield ranks, pipes
    finally:
        for process in ranks:
            process.kill()
            process.join()


def hear(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT), "it says nothing"
    return pipe.recv()


# -- another group in the same process -----------------------------------------------------------


def outlive(
    pipe: Connection, rank: int, folder: Path, layout: str, victims: tuple[int, ...]
) -> None:
    """Form a group. After each death, form another group of the remaining ranks."""
    torch.set_num_threads(1)
    os.environ["HBMCOMM_NODE_ID"] = layout[rank]
    living = list(range(len(layout)))
    for attempt, victim in enumerate((*victims, None)):
        form(folder / f"store{attempt}", living.index(rank), len(living))
        pipe.send(total(rank))
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if victim is not None:
            try:
                while True:
                    dist.all_reduce(torch.ones(1000))
            except dist.DistBackendError as error:
                pipe.send(str(error))
            _get_default_group().abort()
            living.remove(victim)
        dist.destroy_process_group()
    pipe.close()


def check_survivors(folder: Path, layout: str, victims: tuple[int, ...]) -> None:
    with forked(len(layout), outlive, folder, layout, victims) as (ranks, pipes):
        living = set(range(len(layout)))
        for victim in (*victims, None):
            expected = float(sum(rank + 1 for rank in living))
            assert {hear(pipes[rank]) for rank in living} == {expected}
            if victim is not None:
                living.remove(victim)
                for rank in living:
                    assert "has died" in hear(pipes[rank])
        for rank in living:
            ranks[rank].join(LIMIT)
            assert ranks[rank].exitcode == 0


@pytest.mark.parametrize(
    ("layout", "victims"),
    [("aaaa", (2, 0)), pytest.param("aaa", (1,), marks=pytest.mark.full)],
)
def test_survivors_form_another_group(
    layout: str, victims: tuple[int, ...], tmp_path: Path
) -> None:
    """The ranks are on one node. In one case rank 0 dies too."""
    check_survivors(tmp_path, layout, victims)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "victims"), [("aab", (1,)), ("abc", (2,))])
def test_survivors_form_another_group_over_mpi(
    layout: str, victims: tuple[int, ...], tmp_path: Path
) -> None:
    """MPI's world still has the dead rank; the new group's communicator does not need it."""
    check_survivors(tmp_path, layout, victims)


# -- signals and exit codes ----------------------------------------------------------------------


def wait_small() -> None:
    dist.all_reduce(torch.ones(1))


def wait_async() -> None:
    works = [dist.all_reduce(torch.ones(200_000), async_op=True) for _ in range(3)]
    assert works[-1] is not None
    works[-1].wait()


def wait_recv() -> None:
    dist.recv(torch.ones(1), 1)


def wait_new_group() -> None:
    dist.new_group()


def wait_for_ever(pipe: Connection, rank: int, store: Path, call: Callable[[], None]) -> None:
    """Rank 0 waits for rank 1, which does nothing."""
    torch.set_num_threads(1)
    form(store, rank, 2, 10 * LIMIT)
    total(rank)
    if rank == 1:
        pipe.send("formed")
        pipe.recv()
        return
    try:
        pipe.send("formed")  # here, because a signal may come immediately
        call()
    except BaseException as error:
        pipe.send(type(error).__name__)
        raise


@pytest.mark.parametrize("call", [wait_small, wait_async, wait_recv, wait_new_group])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)]
)
def test_a_signal_ends_a_wait(
    number: signal.Signals, code: int, call: Callable[[], None], tmp_path: Path
) -> None:
    """Ctrl-C raises KeyboardInterrupt, which multiprocessing turns into an exit code of 1."""
    with forked(2, wait_for_ever, tmp_path / "store", call) as (ranks, pipes):
        for pipe in pipes:
            assert hear(pipe) == "formed"
        time.sleep(0.2)  # the rank waits by now, mostly; it must end in any case
        pid = ranks[0].pid
        assert pid is not None
        os.kill(pid, number)
        start = time.monotonic()
        ranks[0].join(LIMIT)
        assert time.monotonic() - start < SOON
        assert ranks[0].exitcode == code
        if number == signal.SIGINT:
            assert hear(pipes[0]) == "KeyboardInterrupt"


END = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
rank, store, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
minute = timedelta(seconds=60)
dist.init_process_group("hbm", init_method=store, rank=rank, world_size=2, timeout=minute)
dist.all_reduce(torch.ones(1))
if rank == 1:
    sys.exit(5)  # its group is as it is
try:
    while True:
        dist.all_reduce(torch.ones(1))
except dist.DistBackendError:
    if way == "raise":
        raise
if way == "destroy":
    dist.destroy_process_group()
sys.exit(7 if way == "exit" else 0)
"""


@pytest.mark.full
@pytest.mark.parametrize(("way", "code"), [("raise", 1), ("exit", 7), ("destroy", 0)])
def test_exit_codes_stay_unchanged(way: str, code: int, tmp_path: Path) -> None:
    """Rank 1 ends. Then rank 0 raises, exits or destroys its group, with the usual exit code."""
    store = f"file://{tmp_path}/store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", END, str(rank), store, way],
            env=jobs.environment(),
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(LIMIT) for rank in ranks] == [code, 5]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
