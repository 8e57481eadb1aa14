"""A rank dies while the ranks form a group: the others are notified soon, before the timeout."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.cases import cases
from harness.deaths import SOON_ELSEWHERE, SOON_ON_THE_NODE
from harness.fates import Ranks, Said
from harness.network import await_no_listener, free_port
from torch._C._distributed_c10d import TCPStore

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

TIMEOUT = timedelta(seconds=60)
LIMIT = 120.0


def soon(layout: str) -> float:
    return SOON_ON_THE_NODE if len(set(layout)) == 1 else SOON_ELSEWHERE


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def await_introduced(store: Path, count: int) -> None:
    """Wait until the first `count` ranks have introduced themselves, and half a second longer."""

    def has_introduced_itself(rank: int) -> bool:
        return f"rendezvous1/rendezvous/{rank}".encode() in store.read_bytes()

    await_true(store.exists)
    await_true(lambda: all(map(has_introduced_itself, range(count))))
    time.sleep(0.5)


def assert_named(said: list[Said], victim: int, killed: float, bound: float) -> None:
    print([(each.error, round(each.at - killed, 3), each.text[:150]) for each in said])
    for each in said:
        assert each.error in ("DistBackendError", "DistNetworkError"), each
        assert re.search(
            rf"rank {victim} \(pid \d+ on \S+\)( of group \"\w+\")? has died", each.text
        )
        assert each.at - killed < bound, each


def form(url: str, rank: int, size: int) -> None:
    dist.init_process_group("hbm", init_method=url, rank=rank, world_size=size, timeout=TIMEOUT)


def form_group(pipe: Connection, rank: int, url: str, size: int, port: int = 0) -> None:
    """Form a group. The last rank first joins rank 0's store at `port`, and awaits a message."""
    if rank == size - 1:
        if port:
            TCPStore("127.0.0.1", port, size, False, TIMEOUT)
        pipe.recv()
    form(url, rank, size)


@pytest.mark.parametrize(
    ("layout", "victim"),
    cases(["aaaa", "aabb", "abc"], [0, 1], quick=["aaaa-1", "aabb-0", "abc-1"]),
)
def test_death_in_init(layout: str, victim: int, tmp_path: Path) -> None:
    size = len(layout)
    store = tmp_path / "store"
    with Ranks(size, form_group, f"file://{store}", size, layout=layout) as ranks:
        await_introduced(store, size - 1)
        killed = ranks.signal(victim, signal.SIGKILL)
        said = ranks.hear(*(rank for rank in range(size - 1) if rank != victim))
    assert_named(said, victim, killed, soon(layout))


@pytest.mark.parametrize("victim", cases([0, 1], quick=["0"]))
def test_death_in_init_that_only_the_node_has_seen(victim: int, tmp_path: Path) -> None:
    """Start the last rank, on another node, after the ranks that saw the death have ended."""
    store = tmp_path / "store"
    with Ranks(3, form_group, f"file://{store}", 3, layout="aab") as ranks:
        await_introduced(store, 2)
        ranks.signal(victim, signal.SIGKILL)
        ranks.hear(1 - victim)
        ranks.processes[1 - victim].join(LIMIT)
        ranks.tell(2)
        come = time.monotonic()
        said = ranks.hear(2)
    assert_named(said, victim, come, SOON_ELSEWHERE)


@pytest.mark.parametrize("layout", cases(["aaa", "abc"], quick=["aaa"]))
def test_death_of_the_stores_host_in_init(layout: str) -> None:
    size = len(layout)
    port = free_port()

    def has_come(client: TCPStore, rank: int) -> bool:
        return bool(client.check([f"default_pg/0//cpu//hbm/rendezvous1/rendezvous/{rank}"]))

    with Ranks(size, form_group, f"tcp://127.0.0.1:{port}", size, port, layout=layout) as ranks:
        client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        await_true(lambda: all(has_come(client, rank) for rank in range(size - 1)))
        time.sleep(0.5)
        killed = ranks.signal(0, signal.SIGKILL)
        said = ranks.hear(*range(1, size - 1))
    assert_named(said, 0, killed, soon(layout))


def form_late(pipe: Connection, rank: int, url: str, size: int) -> None:
    """Form a group. Rank 0 has a shorter timeout. The last rank waits for a message first."""
    if rank == size - 1:
        pipe.recv()
    patience = timedelta(seconds=8) if rank == 0 else TIMEOUT
    dist.init_process_group("hbm", init_method=url, rank=rank, world_size=size, timeout=patience)


def test_a_timeout_in_init_ends_the_wait_of_all(tmp_path: Path) -> None:
    """Check that a later rank fails too, instead of waiting for the ranks that have gone."""
    with Ranks(3, form_late, f"file://{tmp_path}/store", 3) as ranks:
        said = ranks.hear(0, 1, limit=LIMIT)
        ranks.tell(2)
        said += ranks.hear(2, limit=LIMIT)
    for each in said:
        assert each.error == "DistBackendError", each
        assert re.search(r"rank 0 of group \"0\" met 2 of 3 ranks .*; missing ranks: 2", each.text)


def form_and_look(pipe: Connection, rank: int, url: str, size: int) -> list[int]:
    """Fail to form a group. Return the ports at which this process then still listens."""
    try:
        form_group(pipe, rank, url, size)
    except dist.DistBackendError as error:
        assert "has died" in str(error)
    return await_no_listener(limit=LIMIT)


def test_a_death_in_init_leaves_no_listener(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Ranks(3, form_and_look, f"file://{store}", 3) as ranks:
        await_introduced(store, 2)
        ranks.signal(1, signal.SIGKILL)
        [said] = ranks.hear(0)
    assert (said.error, said.value) == ("", [])


def form_second_group(pipe: Connection, rank: int, url: str, size: int) -> None:
    """Form two groups. The last rank waits for a message before the second group."""
    form(url, rank, size)
    dist.all_reduce(torch.ones(1))
    pipe.send("ready")
    if rank == size - 1:
        pipe.recv()
    dist.new_group(list(range(size)), timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("layout", "is_missing"),
    cases(
        ["aaa", "aab", "abb"],
        {"missing": True, "come": False},
        quick=["aaa-missing", "aaa-come", "aab-missing"],
    ),
)
def test_death_in_new_group(layout: str, is_missing: bool, tmp_path: Path) -> None:
    """The victim dies after it has called new_group, or, if `is_missing`, before its call."""
    size = len(layout)
    victim = size - 1 if is_missing else 1
    url = f"file://{tmp_path}/store"
    with Ranks(size, form_second_group, url, size, layout=layout) as ranks:
        ranks.hear(*range(size))
        time.sleep(0.5)  # for the other ranks' calls of new_group
        killed = ranks.signal(victim, signal.SIGKILL)
        said = ranks.hear(*(rank for rank in range(size - 1) if rank != victim))
    assert_named(said, victim, killed, soon(layout))
