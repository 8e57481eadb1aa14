"""The warm process of harness.endings, and the ranks that it forks.

serve() also returns in each fork, which then continues at the end of this module. So a fork ends as
a user's script does: by the end of its main module, and the interpreter's shutdown.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
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
    PrefixStore,
    ProcessGroup,
    Store,
    TCPStore,
    _DistributedBackendOptions,
)

TIMEOUT = timedelta(seconds=100)
LARGE = 300_000  # elements: more than one message between nodes
FORMING = ("forming", "meeting")  # states in which rank 0 leaves before it has a group
MOST_SECONDS = 0.05  # longest random sleep of rank 0 between reaching the state and leaving
MOST_SECONDS_TO_FORM = 0.3  # longest random sleep for FORMING, which includes MPI_Init
MANY = 300  # operations
SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
# Ways to leave in which Python alone owns the group.
OWNED = ("del", "in_global", "in_cycle", "in_thread_local")


@dataclass
class Rank:
    rank: int
    frame: str
    state: str
    way: str
    store: str  # path of the FileStore; in the frame "nodes" the prefix of the TCPStore's keys
    port: int  # of a TCPStore that outlives the ranks
    other: int  # a socket to the other rank; it reads end of file when that rank has ended


def serve(folder: str) -> Rank | None:
    """Forks two ranks for each line of stdin, and prints their exit codes and output.

    Returns a Rank in each fork, and None in the warm process at the end of stdin.
    """
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    for line in sys.stdin:
        frame, state, way, limit = json.loads(line)
        place = Path(tempfile.mkdtemp(dir=folder))
        ends, holds = (end.detach() for end in socket.socketpair())
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
                return Rank(rank, frame, state, way, str(place / "store"), port, other)
            processes.append(pid)
        os.close(ends)
        os.close(holds)
        deadline = time.monotonic() + limit
        codes = [code_of(pid, deadline) for pid in processes]
        output = "".join((place / f"output{rank}").read_text()[-2000:] for rank in range(2))
        print(json.dumps({"codes": codes, "output": output}), flush=True)
    server.communicate()
    return None


def code_of(pid: int, deadline: float) -> int | None:
    """Return the exit code. Kills a process that still runs at the deadline, and returns None."""
    pidfd = os.pidfd_open(pid)
    ended = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]
    os.close(pidfd)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status) if ended else None


def store_of(rank: Rank) -> Store:
    if rank.frame != "nodes":
        return FileStore(rank.store, 2)
    tcp = TCPStore("127.0.0.1", rank.port, is_master=False, timeout=TIMEOUT)
    return PrefixStore(rank.store, tcp)


def prepare(rank: Rank) -> Store:
    """Connect the group's store, and load hbm. Return the store.

    If the process ends, hbm cannot end a thread in these steps (docs/design/process-end.md, "What
    hbm cannot end"). So rank 0 takes them before another of its threads may form the group.
    """
    if rank.frame == "nodes":
        os.environ["HBMCOMM_NODE_ID"] = str(rank.rank)
    if rank.frame == "instead":
        from torch_hbmcomm.instead_of import take_the_place_of

        take_the_place_of("gloo")
    importlib.import_module("torch_hbmcomm.backend")
    return store_of(rank)


def form(rank: Rank, store: Store) -> Any:
    """Form the group. Return c10d's group, or only the backend if Python alone is to own it."""
    name = "gloo" if rank.frame == "instead" else "hbm"
    if rank.way not in OWNED:
        dist.init_process_group(name, store=store, rank=rank.rank, world_size=2, timeout=TIMEOUT)
        return dist.group.WORLD
    return create_owned(rank, store)


def create_owned(rank: Rank, store: Store) -> Any:
    from torch_hbmcomm.backend import create

    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank.rank, 2
    options.timeout, options.global_ranks_in_group = TIMEOUT, [0, 1]
    return create(options, None, "gloo" if rank.frame == "instead" else "hbm")


def form_subgroup(rank: Rank, group: Any) -> Any:
    if isinstance(group, ProcessGroup):
        return dist.new_group([0, 1])
    return create_owned(rank, PrefixStore("subgroup", store_of(rank)))


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
    """Call `function` on a daemon thread, and return once the thread runs. Ignore its errors."""
    begun = threading.Event()

    def run() -> None:
        begun.set()
        function()

    threading.Thread(target=run, daemon=True).start()
    begun.wait()


def meet(rank: Rank) -> None:
    """Return once both ranks have come here. Uses no group. Raise if the other rank has ended."""
    os.write(rank.other, b"!")
    assert os.read(rank.other, 1)


class Noted(torch.Tensor):
    """A tensor with a Python attribute. The thread that frees the tensor needs the GIL."""


def ones(size: int) -> torch.Tensor:
    tensor = torch.ones(size).as_subclass(Noted)
    tensor.note = [size]  # type: ignore[attr-defined]
    return tensor


def reduce_many(group: Any) -> None:
    """Issue many allreduces with callbacks, on both ranks. Callbacks run while rank 0 leaves."""
    for _ in range(MANY):
        group.allreduce([ones(5)]).get_future().then(lambda done: done.value())


def reduce_many_until_rank_0_ends(rank: Rank, group: Any) -> None:
    """Return once rank 0 needs rank 1 no more: it has issued its operations, or has ended."""
    try:
        reduce_many(group)
    except RuntimeError as error:
        if "rank 0" not in str(error):
            raise
        while os.read(rank.other, 1):  # until the end of rank 0, which the error is about
            pass
    else:
        os.read(rank.other, 1)


def bring_into_state(role: Rank, group: Any) -> list[Any]:
    """Bring rank 0's group into the state. Return objects that must live until rank 0 leaves."""
    state = role.state
    if state == "destroyed":
        destroy(group)
    elif state == "destroying":
        in_thread(lambda: destroy(group))
    elif state == "aborted":
        group.abort()
    elif state == "broken":
        try:
            reduce_now(group, timedelta(milliseconds=50))
        except RuntimeError:
            return []
        raise AssertionError("rank 1 takes no part")
    elif state in ("in_flight", "then", "wait", "callback"):
        works = [group.allreduce([ones(size)]) for size in (5, LARGE)]
        if state == "then":
            return [*works, *(work.get_future().then(lambda done: done.value()) for work in works)]
        if state == "wait":
            for work in works:
                in_thread(work.wait)
            in_thread(works[1].get_future().wait)
        if state == "callback":  # a callback that waits
            own = torch.futures.Future[None]()
            own.then(lambda _: works[1].wait())
            in_thread(lambda: own.set_result(None))
        return works
    elif state == "called":  # a callback of an operation waits for another operation
        # Rank 1 sends only after then(), so a worker thread runs the callback.
        ended, endless = group.recv([ones(5)], 1, 2), group.allreduce([ones(LARGE)])
        ended.get_future().then(lambda _: endless.wait())
        meet(role)
        meet(role)
        return [ended, endless]
    elif state == "dropped":
        for size in (5, LARGE):
            group.allreduce([ones(size)]).get_future().then(lambda done: done.value())
            group.send([ones(size)], 1, 0)
            group.recv([ones(size)], 1, 1)
    elif state == "many":
        reduce_many(group)
        os.write(role.other, b"!")
    elif state == "sync":
        in_thread(lambda: reduce_now(group))
    elif state == "receive":
        in_thread(lambda: group.recv([torch.ones(7)], 1, 1).wait())
    elif state == "subgroup":
        works = [each.allreduce([ones(5)]) for each in (form_subgroup(role, group), group)]
        in_thread(works[0].wait)
        meet(role)
        return works
    elif state == "forming_subgroup":
        in_thread(lambda: form_subgroup(role, group))
    return []


def leave(way: str) -> None:
    """End the process in the given way. Return if the way is the end of the main module."""
    if way == "exit":
        sys.exit(5)
    if way == "exit_in_thread":
        threading.Thread(target=sys.exit, args=(5,)).start()
    if way == "raise":
        raise ValueError("the program's own")
    if way == "interrupt_twice":
        # At exit C's raise() sends a second SIGINT. raise() runs no Python code, so the
        # KeyboardInterrupt comes in the code that follows.
        atexit.register(ctypes.CDLL(None)["raise"], int(signal.SIGINT))
    if way in ("interrupt", "interrupt_twice"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if way == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if way == "os_exit":
        os._exit(5)


def be_rank_1(rank: Rank) -> None:
    if rank.state == "meeting":
        store = prepare(rank)
        in_thread(lambda: form(rank, store))
    elif rank.state != "forming":
        group = form(rank, prepare(rank))
    if rank.state not in FORMING:
        reduce_now(group)
        meet(rank)  # rank 0 must not leave while rank 1 needs it
    if rank.state == "destroyed":
        destroy(group)
    elif rank.state == "called":
        meet(rank)
        group.send([torch.ones(5)], 0, 2).wait()
        meet(rank)
    elif rank.state == "subgroup":
        group = (group, form_subgroup(rank, group))
        meet(rank)
    elif rank.state == "many":
        reduce_many_until_rank_0_ends(rank, group)
        return
    os.read(rank.other, 1)
    if rank.way != "return" and rank.state != "meeting":
        os._exit(0)  # faster; the runs with the way "return" test the ordinary end of rank 1


class Cycle:
    def __init__(self, held: Any) -> None:
        self.held = held
        self.own = self


torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.freeze()  # otherwise the collector of each ending rank would visit all of torch's objects
role = serve(sys.argv[1])
if role is not None and role.rank == 1:
    be_rank_1(role)
elif role is not None:
    held: Any = None
    alive: list[Any] = []
    store = prepare(role)
    if role.state in FORMING:
        in_thread(lambda: form(role, store))
    else:
        held = form(role, store)
        reduce_now(held)
        meet(role)
        alive = bring_into_state(role, held)
    most = MOST_SECONDS_TO_FORM if role.state in FORMING else MOST_SECONDS
    time.sleep(random.random() * most)
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
