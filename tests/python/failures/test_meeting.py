"""Ranks that must not form a group together: from two jobs in one store, two processes with one
rank, or from different groups. Also ranks that fail before they meet the other ranks.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.cases import cases
from harness.fates import Ranks, Said
from harness.network import free_port
from torch._C._distributed_c10d import TCPStore

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

TIMEOUT = timedelta(seconds=60)
LIMIT = 50.0  # less than the timeout
LAYOUTS = cases(["aaa", "abc"], quick=["aaa", "abc"])


def come_as(
    pipe: Connection, number: int, url: str, port: int, ranks: list[int], size: int
) -> None:
    """Process `number` comes as rank `ranks[number]` of `size`."""
    del pipe
    store = TCPStore("127.0.0.1", port, wait_for_workers=False) if port else None
    dist.init_process_group(
        "hbm",
        init_method=None if store else url,
        store=store,
        rank=ranks[number],
        world_size=size,
        timeout=TIMEOUT,
    )


def assert_all_raised(said: list[Said], *texts: str) -> None:
    for each in said:
        assert each.error == "DistBackendError", each
        for text in texts:
            assert text in each.text, each


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", cases(["file", "tcp"], quick=["file", "tcp"]))
def test_two_processes_with_one_rank(kind: str, layout: str, tmp_path: Path) -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = served.port if kind == "tcp" else 0
    where = (f"file://{tmp_path}/store", port, [0, 1, 1], 3)
    with Ranks(3, come_as, *where, layout=layout) as ranks:
        said = ranks.hear(0, 1, 2, limit=LIMIT)
    assert_all_raised(said, 'rank 1 of group "0" is taken by pid ', "two processes have this rank")


def form_and_wait(pipe: Connection, rank: int, url: str, size: int) -> None:
    dist.init_process_group("hbm", init_method=url, rank=rank, world_size=size, timeout=TIMEOUT)
    pipe.send("formed")
    pipe.recv()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", cases([2, 3], quick=["2", "3"]))
def test_the_file_of_a_killed_job(size: int, layout: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with Ranks(2, form_and_wait, url, 2, layout=layout[:2]) as ranks:
        assert ranks.hear(0, 1) == ["formed", "formed"]
        for rank in (0, 1):
            ranks.signal(rank, signal.SIGKILL)
    with Ranks(size, form_and_wait, url, size, layout=layout[:size]) as ranks:
        said = ranks.hear(*range(size), limit=LIMIT)
    assert_all_raised(said, "the store holds the keys of another job", "a new file for file://")


def reduce_until_error(pipe: Connection, number: int, url: str, port: int, jobs: list[str]) -> int:
    """Processes 0 and 1 form a group as ranks 0 and 1. Process 2 comes as rank 1, too.

    Processes 0 and 1 then reduce until an error; at most twice if process 2 is of another job.
    """
    if jobs[number]:
        os.environ["TORCHELASTIC_RUN_ID"] = jobs[number]
    come_as(pipe, number, url, port, [0, 1, 1], 2)
    pair = dist.new_group([0, 1])
    pipe.send("formed")
    pipe.recv()
    number_of_sums = 0
    while number_of_sums < 2 or jobs[2] == jobs[0]:
        data = torch.ones(1000)
        dist.all_reduce(data, group=pair if number_of_sums % 2 else None)
        assert data.eq(2).all(), data
        number_of_sums += 1
    dist.destroy_process_group()
    return number_of_sums


def form_and_come_late(where: tuple[str, int], layout: str, jobs: list[str]) -> list[Said]:
    """Return the outcomes of processes 0 to 2. Process 2 comes after the group was formed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    url, port = where[0], store.port if where[1] else 0
    with Ranks(2, reduce_until_error, url, port, jobs, layout=layout[:2]) as formed:
        assert formed.hear(0, 1) == ["formed", "formed"]
        with Ranks(3, come_late, url, port, jobs, layout=layout) as late:
            second = late.hear(2, limit=LIMIT)
        formed.tell(0, 1)
        return formed.hear(0, 1, limit=LIMIT) + second


def come_late(pipe: Connection, number: int, url: str, port: int, jobs: list[str]) -> None:
    if number == 2:
        reduce_until_error(pipe, number, url, port, jobs)


LATE = cases(["file", "tcp"], quick=["file", "tcp"])


@pytest.mark.parametrize("layout", cases(["aaa", "aba", "abb", "abc"], quick=["aaa", "abc"]))
@pytest.mark.parametrize("kind", LATE)
def test_a_second_claim_ends_the_formed_group(kind: str, layout: str, tmp_path: Path) -> None:
    where = (f"file://{tmp_path}/store", int(kind == "tcp"))
    said = form_and_come_late(where, layout, ["", "", ""])
    assert_all_raised(said, 'rank 1 of group "0" is taken by pid ', "two processes have this rank")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_torchrun_jobs_claim_leaves_the_group_alone(layout: str, tmp_path: Path) -> None:
    said = form_and_come_late((f"file://{tmp_path}/store", 0), layout, ["one", "one", "two"])
    assert [each.value for each in said[:2]] == [2, 2], said
    assert_all_raised(said[2:], 'rank 1 of group "0" is taken by pid ')


def come_from(pipe: Connection, rank: int, url: str, jobs: list[str]) -> None:
    if jobs[rank]:
        os.environ["TORCHELASTIC_RUN_ID"] = jobs[rank]
    come_as(pipe, rank, url, 0, [0, 1, 2], 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("second", ["one", ""])
def test_ranks_of_two_torchrun_jobs(second: str, layout: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with Ranks(3, come_from, url, ["one", second, "two"], layout=layout) as ranks:
        said = ranks.hear(0, 1, 2, limit=LIMIT)
    assert_all_raised(said, 'is of the job "one"', 'is of the job "two"', "a new file for file://")


def form_half(pipe: Connection, rank: int, port: int) -> list[float]:
    """Return the sums of groups that each half of the ranks forms without the other half."""
    del pipe
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("hbm", store=store, rank=rank, world_size=4, timeout=TIMEOUT)
    sums = []
    for _ in range(3):
        group = dist.new_group([0, 1] if rank < 2 else [2, 3])
        data = torch.full((1000,), rank + 1.0)
        dist.all_reduce(data, group=group)
        sums += [float(data.min()), float(data.max())]
    dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("layout", cases(["aaaa", "aabb", "abab"], quick=["aaaa", "abab"]))
def test_groups_of_one_name_by_halves(layout: str) -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Ranks(4, form_half, served.port, layout=layout) as ranks:
        said = ranks.hear(*range(4), limit=LIMIT)
    assert [each.value for each in said] == [[3.0] * 6] * 2 + [[7.0] * 6] * 2, said


def form_part(pipe: Connection, rank: int, port: int, named: list[list[int]]) -> None:
    del pipe
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("hbm", store=store, rank=rank, world_size=3, timeout=TIMEOUT)
    dist.new_group(named[rank])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_name_different_members(layout: str) -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    named = [[0, 1], [0, 1, 2], [0, 1, 2]]
    with Ranks(3, form_part, served.port, named, layout=layout) as ranks:
        said = ranks.hear(0, 1, 2, limit=LIMIT)
    assert_all_raised(said, "names the ranks [0, 1]", "names the ranks [0, 1, 2]")


def come_by_environment(pipe: Connection, number: int, port: int, ranks: list[int]) -> None:
    del pipe
    os.environ.update(
        RANK=str(ranks[number]), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dist.init_process_group("hbm", timeout=TIMEOUT)


@pytest.mark.parametrize("rank", [-1, 2, 5])
def test_a_rank_out_of_range(rank: int) -> None:
    with Ranks(2, come_by_environment, free_port(), [0, rank]) as ranks:
        waiting, wrong = ranks.hear(0, 1, limit=LIMIT)
    text = f'rank {rank} is not in group "0" of 2 ranks'
    assert wrong.error == "ValueError", wrong
    assert text in wrong.text
    assert_all_raised([waiting], f'rank {rank} of group "0" cannot take part: {text}')


def no_thread() -> None:
    """Load the native module. Then leave too little address space for threads or segments."""
    importlib.import_module("torch_hbmcomm.backend")
    no_address_space()


def no_address_space() -> None:
    """Leave too little address space for the native module."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**21, used + 2**21))


def no_descriptor() -> None:
    """Leave no descriptor for the socket at which the ranks of the node meet."""
    importlib.import_module("torch_hbmcomm.backend")
    no_file()


def no_file() -> None:
    """Leave no descriptor for the native module."""
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(most):
        try:
            os.dup(0)
        except OSError:
            return


def no_module() -> None:
    sys.modules["torch_hbmcomm.backend"] = None  # type: ignore[assignment]


def no_option() -> None:
    os.environ["HBMCOMM_STAGING_BYTES"] = "many"


SHORTAGES = {
    no_thread: "ulimit -v",
    no_address_space: "ulimit -v",
    no_descriptor: "ulimit -n",
    no_file: "ulimit -n",
    no_module: "torch_hbmcomm.backend",
    no_option: "HBMCOMM_STAGING_BYTES",
}


def form_with(pipe: Connection, rank: int, port: int, shortages: list[str]) -> None:
    """Rank 1 alone lacks something."""
    del pipe
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    if rank == 1:
        {each.__name__: each for each in SHORTAGES}[shortages[0]]()
    dist.init_process_group("hbm", store=store, rank=rank, world_size=3, timeout=TIMEOUT)


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_rank_that_fails_before_it_meets_the_others(shortage: Callable[[], None]) -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Ranks(3, form_with, served.port, [shortage.__name__]) as ranks:
        said = ranks.hear(0, 1, 2, limit=LIMIT)
    assert SHORTAGES[shortage] in said[1].text, said[1]
    others = [said[0], said[2]]
    assert_all_raised(others, 'rank 1 of group "0" cannot take part: ', SHORTAGES[shortage])
