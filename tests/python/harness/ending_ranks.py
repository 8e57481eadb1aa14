"""The warm process of harness.endings, and the ranks that it forks: see there.

serve() returns in a fork too, which then continues at the end of this module. So a fork ends as a
user's script does: by the end of its main module, and the interpreter's shutdown.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    FileStore,
    ProcessGroup,
    _DistributedBackendOptions,
)

TIMEOUT = timedelta(seconds=100)
LARGE = 300_000  # elements: more than one message between nodes
MOST_SECONDS = 0.05  # between the state and the end: other moments in other runs
OWNED = ("del", "in_global", "in_cycle", "in_thread_local")  # ways: Python alone owns the group


@dataclass
class Rank:
    rank: int
    frame: str
    state: str
    way: str
    store: str  # the file's path
    other: int  # a descriptor: rank 0 ends when it is closed, rank 1 holds it until it ends


def serve(folder: str) -> Rank | None:
    """Forks the ranks that the lines of stdin ask for, and tells how they ended. Returns a rank
    in each fork, and None at the end of stdin."""
    for line in sys.stdin:
        frame, state, way, limit = json.loads(line)
        place = Path(tempfile.mkdtemp(dir=folder))
        ends, holds = os.pipe()
        processes = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.close(ends if rank == 0 else holds)
                with open(place / f"output{rank}", "wb", buffering=0) as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                other = holds if rank == 0 else ends
                return Rank(rank, frame, state, way, str(place / "store"), other)
            processes.append(pid)
        os.close(ends)
        os.close(holds)
        deadline = time.monotonic() + limit
        codes = [code_of(pid, deadline) for pid in processes]
        output = "".join((place / f"output{rank}").read_text()[-2000:] for rank in range(2))
        print(json.dumps({"codes": codes, "output": output}), flush=True)
    return None


def code_of(pid: int, deadline: float) -> int | None:
    """Return the exit code; None for a process that has to be killed at the deadline."""
    pidfd = os.pidfd_open(pid)
    ended = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]
    os.close(pidfd)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status) if ended else None


def form(rank: Rank) -> Any:
    """Form the group, and return c10d's group, or the backend alone if Python is to own it."""
    if rank.frame == "nodes":
        os.environ["HBMCOMM_NODE_ID"] = str(rank.rank)
    store = FileStore(rank.store, 2)
    name = "gloo" if rank.frame == "instead" else "hbm"
    if rank.frame == "instead":
        from torch_hbmcomm.instead_of import take_the_place_of

        take_the_place_of("gloo")
    if rank.way not in OWNED:
        dist.init_process_group(name, store=store, rank=rank.rank, world_size=2, timeout=TIMEOUT)
        return dist.group.WORLD
    from torch_hbmcomm.backend import create

    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank.rank, 2
    options.timeout, options.global_ranks_in_group = TIMEOUT, [0, 1]
    return create(options, None, name)


def destroy(group: Any) -> None:
    if isinstance(group, ProcessGroup):
        dist.destroy_process_group()
    else:
        group.shutdown()


def reduce_now(group: Any, timeout: timedelta = TIMEOUT) -> None:
    options = AllreduceOptions()
    options.asyncOp = False
    options.timeout = timeout
    group.allreduce([torch.ones(7)], options).wait()


def in_thread(function: Any) -> None:
    """Call it on a daemon thread, whose error is of no interest."""
    begun = threading.Event()

    def run() -> None:
        begun.set()
        function()

    threading.Thread(target=run, daemon=True).start()
    begun.wait()


def bring_into_state(group: Any, state: str) -> list[Any]:
    """Return works and futures that have to live until the end."""
    if state == "destroyed":
        destroy(group)
    elif state == "aborted":
        group.abort()
    elif state == "broken":
        try:
            reduce_now(group, timedelta(milliseconds=50))
        except RuntimeError:
            return []
        raise AssertionError("rank 1 takes no part")
    elif state in ("in_flight", "then", "wait", "callback"):
        works = [group.allreduce([torch.ones(size)]) for size in (5, LARGE)]
        if state == "then":
            return [*works, *(work.get_future().then(lambda done: done.value()) for work in works)]
        if state == "wait":
            for work in works:
                in_thread(work.wait)
        if state == "callback":  # a callback that waits
            own = torch.futures.Future[None]()
            own.then(lambda _: works[1].wait())
            in_thread(lambda: own.set_result(None))
        return works
    elif state == "dropped":
        for size in (5, LARGE):
            group.allreduce([torch.ones(size)]).get_future().then(lambda done: done.value())
            group.send([torch.ones(size)], 1, 0)
            group.recv([torch.ones(size)], 1, 1)
    elif state == "sync":
        in_thread(lambda: reduce_now(group))
    return []


def leave(way: str) -> None:
    """Leave, or return for main to do so."""
    if way == "exit":
        sys.exit(5)
    if way == "exit_in_thread":
        threading.Thread(target=sys.exit, args=(5,)).start()
    if way == "raise":
        raise ValueError("the program's own")
    if way == "interrupt_twice":
        atexit.register(os.kill, os.getpid(), signal.SIGINT)
    if way in ("interrupt", "interrupt_twice"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if way == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if way == "os_exit":
        os._exit(5)


def be_rank_1(rank: Rank) -> None:
    if rank.state != "forming":
        group = form(rank)
        reduce_now(group)
        if rank.state == "destroyed":
            destroy(group)
    os.read(rank.other, 1)


class Cycle:
    def __init__(self, held: Any) -> None:
        self.held = held
        self.own = self


torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
role = serve(sys.argv[1])
if role is not None and role.rank == 1:
    be_rank_1(role)
elif role is not None:
    if role.state == "forming":
        in_thread(lambda: form(role))
        held: Any = None
        alive: list[Any] = []
    else:
        held = form(role)
        reduce_now(held)
        alive = bring_into_state(held, role.state)
    time.sleep(random.random() * MOST_SECONDS)
    if role.way == "del":
        del held
    elif role.way == "in_cycle":
        held = Cycle(held)
        del held
    elif role.way == "in_thread_local":
        place = threading.local()
        place.held = held
        del held
    leave(role.way)
