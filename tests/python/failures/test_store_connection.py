"""The c10d store of a job: its host dies, is stopped, or runs out of descriptors."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.cases import cases
from harness.fates import Ranks, Said
from harness.network import free_port, own_connections
from torch._C._distributed_c10d import TCPStore

import torch_hbmcomm as hbmcomm

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

SOON = 20.0  # seconds, twenty times the bound of docs/failures.md
TIMEOUT = 60.0


def served_by_rank_0() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def form(url: str, rank: int, size: int, timeout: float = TIMEOUT) -> None:
    dist.init_process_group(
        "hbm",
        init_method=url,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )


# A host that has died.


def group_after_the_end_of_rank_0(pipe: Connection, rank: int, url: str) -> None:
    form(url, rank, 3)
    dist.all_reduce(torch.ones(4))
    pipe.send("ready")
    if rank == 0:
        signal.pause()
    pipe.recv()
    pipe.send(time.monotonic())
    dist.new_group([1, 2])


@pytest.mark.parametrize("layout", ["aaa", "aab"])
def test_new_group_after_the_death_of_the_stores_host(layout: str) -> None:
    with Ranks(3, group_after_the_end_of_rank_0, served_by_rank_0(), layout=layout) as ranks:
        ranks.hear(0, 1, 2)
        ranks.signal(0, signal.SIGKILL)
        ranks.processes[0].join()
        ranks.tell(1, 2)
        began = ranks.hear(1, 2)
        for start, said in zip(began, ranks.hear(1, 2), strict=True):
            assert said.error in ("DistNetworkError", "DistBackendError"), said
            assert re.search(r"rank 0 \(pid \d+ on \S+\)( of group \"\d+\")? has died", said.text)
            assert said.at - start < SOON, said


# The store ends, and the group continues.


def leave_without_store(pipe: Connection, rank: int, url: str, port: int) -> list[str]:
    """Use a store that ends during the test. Returns the errors of calls that need the store.

    With a `port`, process 2 serves the store there; otherwise the store is at `url`.
    """
    if rank == 2:
        store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        pipe.send("serving")
        signal.pause()
        del store
    pipe.recv()
    if port:
        joined = TCPStore("127.0.0.1", port, None, False)
        timeout = timedelta(seconds=TIMEOUT)
        dist.init_process_group("hbm", store=joined, rank=rank, world_size=2, timeout=timeout)
    else:
        form(url, rank, 2)
    dist.all_reduce(torch.ones(4))
    pipe.send("ready")
    pipe.recv()
    errors = []
    for use in (hbmcomm.monitored_barrier, dist.new_group):
        try:
            use()
        except RuntimeError as error:
            errors.append(str(error))
    if not port:  # collectives continue
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert (tensor == 2).all()
    return errors


def errors_of(ranks: Ranks, go: Callable[[], object]) -> list[str]:
    ranks.tell(0, 1)
    ranks.hear(0, 1)
    go()
    ranks.tell(0, 1)
    said: list[Said] = ranks.hear(0, 1)
    assert all(not each.error for each in said), said
    assert all(len(each.value) == 2 for each in said), said
    return [text for each in said for text in each.value]


@pytest.mark.parametrize("layout", ["aa", "ab"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_file_of_the_store_is_named(layout: str, replaced: bool, tmp_path: Path) -> None:
    file = tmp_path / "store"

    def remove() -> None:
        other = tmp_path / "other"
        other.write_bytes(b"")
        other.rename(file) if replaced else file.unlink()

    with Ranks(2, leave_without_store, f"file://{file}", 0, layout=layout) as ranks:
        errors = errors_of(ranks, remove)
    cause = "another file has taken its place" if replaced else "the file was removed"
    for error in errors:
        assert f"the c10d store in the file {file} is gone: {cause} (" in error, error
        assert error.startswith(("monitored_barrier of group", 'group "1" cannot be made: ')), error
        assert "missing ranks" not in error, error


@pytest.mark.parametrize("layout", ["aac", "abc"])
def test_an_ended_stores_address_is_named(layout: str) -> None:
    port = free_port()
    with Ranks(3, leave_without_store, "", port, layout=layout) as ranks:
        ranks.hear(2)

        def end() -> None:
            ranks.signal(2, signal.SIGKILL)
            ranks.processes[2].join()

        errors = errors_of(ranks, end)
    for error in errors:
        assert f"the c10d store at 127.0.0.1:{port} is gone: " in error, error
        assert error.startswith(("monitored_barrier of group", 'group "1" cannot be made: ')), error


# A host that does not answer.


def sums_until_message(pipe: Connection, rank: int, url: str, size: int) -> int:
    """All-reduce until rank 0 gets a message; check each sum. Returns the number of sums."""
    form(url, rank, size)
    pipe.send("ready")
    done = 0
    goes_on = torch.ones(1)
    while goes_on.item():
        tensor = torch.full((1000,), float(rank + done))
        dist.all_reduce(tensor)
        assert (tensor == sum(other + done for other in range(size))).all()
        done += 1
        goes_on = torch.tensor([0.0 if rank == 0 and pipe.poll() else 1.0])
        dist.broadcast(goes_on, 0)
    dist.destroy_process_group()
    return done


@pytest.mark.full
def test_a_stopped_rank_is_not_dead() -> None:
    """All jobs run in parallel, because each waits for longer than the store's timeout."""
    with ExitStack() as stack:
        jobs = [
            (
                victim,
                range(size),
                stack.enter_context(
                    Ranks(size, sums_until_message, served_by_rank_0(), size, layout=layout)
                ),
            )
            for layout in ("aa", "ab", "aab")
            for size in [len(layout)]
            for victim in (0, 1)
        ]
        for _, everyone, ranks in jobs:
            ranks.hear(*everyone)
        for victim, _, ranks in jobs:
            ranks.signal(victim, signal.SIGSTOP)
        time.sleep(10)
        for victim, _, ranks in jobs:
            ranks.signal(victim, signal.SIGCONT)
        time.sleep(1)
        for victim, everyone, ranks in jobs:
            ranks.tell(0)
            said = ranks.hear(*everyone)
            assert [each.error for each in said] == [""] * len(everyone), (victim, said)
            assert len({each.value for each in said}) == 1 and said[0].value > 0, (victim, said)


# Descriptors.


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def connections_to(port: int) -> int:
    """Count this process' connections to a port of this machine, over IPv4 or IPv6."""
    return sum(remote == port for _, remote, _ in own_connections())


def await_own_connection(port: int) -> None:
    """Use the store, which opens a second connection. Wait for this connection, 60 s at most.

    The second use is answered over it, so the host of the store has accepted it.
    """
    hbmcomm.monitored_barrier()
    until = time.monotonic() + 60
    while connections_to(port) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    hbmcomm.monitored_barrier()


def many_groups(pipe: Connection, rank: int, url: str, size: int, count: int) -> tuple[int, int]:
    """Return the descriptors after a tenth of the groups, and after all groups.

    Waits up to 30 s for the failure monitor. It may listen for other ranks while a group is being
    formed, and closes the listener soon afterwards.
    """
    form(url, rank, size)
    await_own_connection(int(url.rpartition(":")[2]))
    found = []
    for number in range(count):
        group = dist.new_group(list(range(size)))
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == size
        if number + 1 in (count // 10, count):
            dist.barrier()
            found.append(descriptors())
    few, many = found
    until = time.monotonic() + 30
    while many > few and time.monotonic() < until:
        time.sleep(0.01)
        many = descriptors()
    dist.barrier()
    return few, many


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        pytest.param("aaa", 20, id="one_node"),
        pytest.param("aabb", 20, id="two_nodes"),
        pytest.param("a" * 8, 100, id="8_ranks", marks=pytest.mark.full),
    ],
)
def test_groups_take_no_descriptors(layout: str, count: int) -> None:
    size = len(layout)
    with Ranks(size, many_groups, served_by_rank_0(), size, count, layout=layout) as ranks:
        for said in ranks.hear(*range(size)):
            assert not said.error, said
            few, many = said.value
            assert many <= few, said


def connections_of_groups(pipe: Connection, rank: int, url: str, size: int) -> tuple[int, int]:
    """Return the number of connections to the store after three groups, and after a barrier."""
    form(url, rank, size)
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=dist.new_group(list(range(size))))
    port = int(url.rpartition(":")[2])
    made = connections_to(port)
    await_own_connection(port)
    asked = connections_to(port)
    dist.barrier()
    return made, asked


def test_groups_on_one_node_share_pytorchs_connection() -> None:
    """Groups share it, because a silent name server delays the store at each new connection."""
    with Ranks(3, connections_of_groups, served_by_rank_0(), 3, layout="aaa") as ranks:
        said = ranks.hear(0, 1, 2)
    assert [each.error for each in said] == [""] * 3, said
    assert [each.value for each in said] == [(1, 2)] * 3, said


def few_descriptors(pipe: Connection, rank: int, port: int, size: int, spare: int) -> None:
    timeout = timedelta(seconds=5)
    store = TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
    if rank == 0:  # PyTorch's connections are open already
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + spare, hard))
    pipe.send("connected")
    pipe.recv()
    store.set_timeout(timeout)
    dist.init_process_group("hbm", store=store, rank=rank, world_size=size, timeout=timeout)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("spare", cases([1, 3, 5], quick=["3"]))
def test_too_few_descriptors_are_named(spare: int) -> None:
    """Rank 0, which serves the store, cannot accept the others' connections."""
    size = 6
    with Ranks(size, few_descriptors, free_port(), size, spare) as ranks:
        everyone = range(size)
        ranks.hear(*everyone)
        ranks.tell(*everyone)
        said: list[Said] = ranks.hear(*everyone, limit=40)
    assert any("ulimit -n" in each.text for each in said), said
    assert all(each.error for each in said), said
