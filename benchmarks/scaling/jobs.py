"""Jobs of many processes on this machine, and their times."""

from __future__ import annotations

import compileall
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import torch_hbmcomm
from benchmarks.scaling.model import StoreCosts

CONTENDERS = {
    "hbm": "hbm, all ranks on one node",
    "hbm, loaded": "the same, its native module loaded before the time begins",
    "hbm, nodes": "hbm over MPI, each rank on its own node (HBMCOMM_NODE_ID)",
    "gloo": "PyTorch's own backend",
}
_LIMIT = timedelta(seconds=120)
_CALLS, _BLOCKS = 20, 3
_RECORD = "x" * 256  # about as long as a rank's introduction
_KEYS = (1, 1024)
_TRIES = 7


@contextmanager
def served() -> Iterator[TCPStore]:
    """Serve a store in this process, as torchrun's agent does."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_LIMIT)


def started(contender: str, ranks: int) -> tuple[float, float, float]:
    """Start a job, and return three times in seconds.

    - from the first rank's init_process_group to the last rank's first result
    - the processor time of a rank until its first result, mean over the ranks
    - the median time of an all_reduce of 8 bytes, on the slowest rank
    """
    found = _job(_start, ranks, contender, ranks)
    begun, formed, worked, blocks = zip(*found, strict=True)
    reduction = statistics.median(map(max, zip(*blocks, strict=True)))
    return max(formed) - min(begun), statistics.mean(worked), reduction


def _start(
    rank: int, store: TCPStore, contender: str, ranks: int
) -> tuple[float, float, float, list[float]]:
    backend, _, how = contender.partition(", ")
    if how == "nodes":
        os.environ["HBMCOMM_NODE_ID"] = str(rank)
    if how == "loaded":
        from torch_hbmcomm.native import load  # other contenders load it in the measured time

        load()
        store.set(f"loaded {rank}", "")
        store.wait([f"loaded {other}" for other in range(ranks)])
    begun, worked = time.monotonic(), time.process_time()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_LIMIT)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    formed, worked = time.monotonic(), time.process_time() - worked
    if not (tensor == ranks).all():
        raise RuntimeError(f"a sum of {ranks} ones is {tensor.tolist()}")
    blocks = []
    for _ in range(_BLOCKS):
        dist.barrier()
        begin = time.monotonic()
        for _ in range(_CALLS):
            dist.all_reduce(tensor)
        blocks.append((time.monotonic() - begin) / _CALLS)
    dist.destroy_process_group()
    return begun, formed, worked, blocks


def gathered(ranks: int) -> float:
    """Return the seconds in which all ranks publish a record in a store, and read all records."""
    found = _job(_gather, ranks, ranks)
    begun, ended = zip(*found, strict=True)
    return float(max(ended) - min(begun))


def _gather(rank: int, store: TCPStore, ranks: int) -> tuple[float, float]:
    keys = [str(other) for other in range(ranks)]
    begun = time.monotonic()
    store.set(keys[rank], _RECORD)
    pause = 50e-6
    while not store.check(keys):
        time.sleep(pause)
        pause = min(1.5 * pause, 10e-3)
    store.multi_get(keys)
    return begun, time.monotonic()


def store_costs() -> StoreCosts:
    """Measure a store with one client. Half of a request's time counts as the store's cost."""
    with served() as store:
        for key in range(max(_KEYS)):
            store.set(str(key), _RECORD)
        one, seen = _costs(store.check)
        other, read = _costs(store.multi_get)
    return StoreCosts(question=min(one, other), seen=seen, read=read)


def _costs(ask: Callable[[list[str]], object]) -> tuple[float, float]:
    """Return the store's seconds for a request of one key, and for each further key."""
    medians = []
    for count in _KEYS:
        keys = [str(key) for key in range(count)]
        tries = []
        for _ in range(_TRIES):
            begin = time.perf_counter()
            ask(keys)
            tries.append(time.perf_counter() - begin)
        medians.append(statistics.median(tries) / 2)
    one, many = medians
    return one, max(0.0, (many - one) / (_KEYS[1] - _KEYS[0]))


def _job(function: Callable[..., Any], ranks: int, *arguments: object) -> list[Any]:
    """Run `function(rank, store, *arguments)` in `ranks` processes, and return their results.

    The processes begin when all are connected to the store. Raises RuntimeError if a process ends
    without a result, or sends nothing for _LIMIT.
    """
    _compile_package()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch_hbmcomm", "benchmarks.scaling.__main__"])
    with served() as store:
        members, pipes = [], []
        try:
            for rank in range(ranks):
                ours, theirs = processes.Pipe()
                member = processes.Process(
                    target=_member, args=(theirs, function, rank, store.port, arguments)
                )
                member.start()
                theirs.close()
                members.append(member)
                pipes.append(ours)
            _heard(pipes)
            for pipe in pipes:
                pipe.send(None)
            return _heard(pipes)
        finally:
            for member in members:
                member.kill()
                member.join()


@cache
def _compile_package() -> None:
    """Compile the package's Python files, as pip does when it installs them.

    Otherwise, with PYTHONDONTWRITEBYTECODE, each rank would compile them again.
    """
    compileall.compile_dir(Path(torch_hbmcomm.__file__).parent, quiet=2)


def _heard(pipes: Sequence[Connection]) -> list[Any]:
    found = []
    for rank, pipe in enumerate(pipes):
        try:
            if not pipe.poll(_LIMIT.total_seconds()):
                raise RuntimeError(f"rank {rank} of {len(pipes)} sent nothing for {_LIMIT}")
            found.append(pipe.recv())
        except EOFError:
            raise RuntimeError(f"rank {rank} of {len(pipes)} ended without a result") from None
    return found


def _member(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    port: int,
    arguments: Sequence[object],
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, timeout=_LIMIT)
    pipe.send("here")
    pipe.recv()
    pipe.send(function(rank, store, *arguments))
