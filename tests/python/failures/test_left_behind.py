"""Killed ranks leave nothing behind, and destroyed groups leave neither memory nor messages."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, RankFailure, beyond_gloo
from harness.cases import cases
from harness.context import BACKEND
from harness.network import await_no_listener
from harness.nodes import on_nodes
from harness.pool import DIED
from harness.segments import held, in_use, mappings
from torch._C._distributed_c10d import TCPStore

from torch_hbmcomm import memory

pytestmark = beyond_gloo

LARGE = 1 << 22  # elements
EXACT = ("in use", "descriptors", "mappings")  # must be equal before and after


def segments_of(context: Context) -> list[int]:
    dist.barrier()
    return [inode for _, _, inode in mappings("self")]


def be_killed_in_the_middle(context: Context, zero_copy: bool) -> None:
    """Reduce until this rank is killed, at a random moment. Never returns."""
    data = (memory.empty(LARGE) if zero_copy else torch.empty(LARGE)).fill_(1)
    dist.all_reduce(data)
    moment = 0.3 + context.own_random.random() / 10
    threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            dist.all_reduce(data)
    except dist.DistBackendError:  # another rank was killed before this one
        time.sleep(30)


def holders(inodes: set[int]) -> list[str]:
    """Return the processes that map one of the segments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mapped = {inode for _, _, inode in mappings(process.name)}
        except OSError:
            continue  # the process has just ended, or belongs to another user
        if mapped & inodes:
            found.append(process.name)
    return found


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero_copy", [True, False], ids=["zero-copy", "staged"])
def test_killed_ranks_leave_nothing(
    ranks: int, zero_copy: bool, socket_folder: Path, nothing_left: None
) -> None:
    pool = Pool(ranks, environment={"HBMCOMM_SOCKET_DIR": str(socket_folder)})
    try:
        pids = pool.pids
        inodes = {inode for found in pool.run(segments_of) for inode in found}
        assert len(inodes) >= ranks, "every rank has a segment, and maps it"
        with pytest.raises(RankFailure) as raised:
            pool.run(be_killed_in_the_middle, zero_copy)
    finally:
        pool.kill()
    assert raised.value.kinds == dict.fromkeys(range(ranks), DIED), raised.value
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert holders(inodes) == []
    assert os.listdir(socket_folder) == []


def form_over(context: Context, port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(BACKEND, store=store, rank=context.rank, world_size=context.size)


def footprint() -> dict[str, int]:
    """Return the process's memory in bytes, and the numbers of its descriptors and mappings."""
    status = Path("/proc/self/status").read_text()
    resident = int(status.partition("RssAnon:")[2].split()[0]) << 10
    return {
        "in use": in_use(),
        "held": held(),
        "resident": resident,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(mappings("self")),
    }


def make_and_destroy(context: Context, cycles: int) -> dict[str, int]:
    for cycle in range(cycles):
        group = dist.new_group()
        data = memory.empty(100_000).fill_(1)
        dist.all_reduce(data, group=group)
        staged = torch.full((100_000,), float(cycle))
        dist.broadcast(staged, 0, group=group)
        assert (data == context.size).all() and (staged == cycle).all()
        dist.destroy_process_group(group)
        del data, group
    # A rank frees its memory of a destroyed group when all ranks have left that group and this rank
    # forms another group.
    gc.collect()
    dist.barrier()
    last = dist.new_group()
    assert not await_no_listener()
    found = footprint()
    dist.destroy_process_group(last)
    return found


def settled(pool: Pool) -> list[dict[str, int]]:
    """Return the ranks' footprints, once the pool's earlier tests have cleaned up."""
    found = pool.run(make_and_destroy, 20)
    for _ in range(10):
        time.sleep(1)
        earlier, found = found, pool.run(make_and_destroy, 20)
        if all(e[x] == f[x] for e, f in zip(earlier, found, strict=True) for x in EXACT):
            break
    return found


@pytest.mark.timeout(6000)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("cycles", cases([40, 200, 5000], quick=["40"], long=["5000"]))
def test_groups_that_are_destroyed_leave_nothing(
    bare_pool: Pool, cycles: int, nothing_left: None
) -> None:
    """This process serves the store, which keeps the groups' keys, as torchrun's agent does.

    A FileStore would keep a copy of every key in each rank, which PyTorch never frees: about 1.6 KB
    for a group. test_few_keys counts the keys.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    bare_pool.run(form_over, store.port)
    before = settled(bare_pool)
    after = bare_pool.run(make_and_destroy, cycles, limit=120 + cycles)
    for early, late in zip(before, after, strict=True):
        for exact in EXACT:
            assert late[exact] == early[exact], (exact, early, late)
        assert late["held"] <= early["held"] + (1 << 20), (early, late)
        assert late["resident"] <= early["resident"] + (8 << 20), (early, late)


def scatter(group: dist.ProcessGroup, value: float, rank: int, sender: int) -> float:
    data = torch.zeros(1)
    parts = [torch.full((1,), value)] * 2 if rank == sender else None
    dist.scatter(data, parts, src=sender, group=group)
    return data.item()


def send(group: dist.ProcessGroup, value: float, rank: int, sender: int) -> float:
    data = torch.full((1,), value)
    if rank == sender:
        dist.send(data, 1 - rank, group=group)
    else:
        dist.recv(data, sender, group=group)
    return data.item()


def leave_a_message(context: Context, move: Callable[..., float]) -> str | float:
    """Each rank sends a message that its peer never receives. Then rank 0 sends in a new group."""
    earlier = dist.new_group()
    move(earlier, 10.0, context.rank, context.rank)
    dist.destroy_process_group(earlier)
    del earlier
    gc.collect()
    later = dist.new_group()
    try:
        return move(later, 11.0, context.rank, 0)
    except dist.DistBackendError as error:
        return str(error)
    finally:
        dist.destroy_process_group(later)


@pytest.mark.parametrize("layer", ["auto", "mpi"])
@pytest.mark.parametrize("move", [scatter, send])
def test_an_unreceived_message_does_not_reach_a_later_group(
    move: Callable[..., float], layer: str, nothing_left: None
) -> None:
    pool = Pool(2, bare=True, environment={"HBMCOMM_NODE": layer})
    try:
        for _ in range(2):
            sent, received = pool.run(on_nodes, "ab", leave_a_message, move)
            assert sent == 11 or "earlier group" in str(sent)
            assert received == 11 or "is of an earlier group" in str(received)
    finally:
        pool.kill()
