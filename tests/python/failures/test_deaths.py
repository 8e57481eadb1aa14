"""A rank dies or stops: the ranks that wait for it soon have a precise error, and can leave."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.cases import cases
from harness.deaths import (
    SOON_ELSEWHERE,
    SOON_ON_THE_NODE,
    Call,
    Fate,
    Job,
    assert_notified,
    report,
    served_by_rank_0,
)
from harness.fates import Ranks
from torch.distributed.distributed_c10d import _get_default_group

from torch_hbmcomm import memory

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

LARGE = 1 << 22  # elements


def all_reduce_small(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(1))


def all_reduce_large(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(LARGE))


def all_reduce_zero_copy(rank: int, size: int) -> None:
    dist.all_reduce(memory.empty(LARGE).fill_(1))


def all_reduce_async(rank: int, size: int) -> None:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    for work in works:
        assert work is not None
        work.wait()


def broadcast(rank: int, size: int) -> None:
    """Broadcast from every rank, one after another."""
    for root in range(size):
        dist.broadcast(torch.ones(LARGE), root)


def all_to_all(rank: int, size: int) -> None:
    dist.all_to_all_single(torch.ones(size * 1000), torch.ones(size * 1000))


def all_to_all_large(rank: int, size: int) -> None:
    """Run an all_to_all. Between nodes it is split into turns."""
    dist.all_to_all_single(torch.ones(size * LARGE // 4), torch.ones(size * LARGE // 4))


def ring(rank: int, size: int) -> None:
    """Send to the next rank, and receive from the previous rank."""
    sent = dist.isend(torch.ones(100_000), (rank + 1) % size)
    dist.recv(torch.empty(100_000), (rank - 1) % size)
    assert sent is not None
    sent.wait()


OPERATIONS: dict[Call, str] = {
    all_reduce_small: r"allreduce #\d+ \(SUM\) of 1 float32",
    all_reduce_large: rf"allreduce #\d+ \(SUM\) of {LARGE} float32",
    all_reduce_zero_copy: rf"allreduce #\d+ \(SUM\) of {LARGE} float32",
    all_reduce_async: r"allreduce #\d+ \(SUM\) of 1000 float32",
    broadcast: rf"broadcast #\d+ .*{LARGE} float32",
    all_to_all: r"alltoall #\d+ .*float32",
    all_to_all_large: r"alltoall #\d+ .*float32",
    ring: r"(send|recv)",
}


# One node.


@pytest.mark.parametrize(
    ("size", "call"),
    cases(
        {f"{size}ranks": size for size in (2, 3, 4)},
        [call for call in OPERATIONS if call is not all_to_all_large],
        quick=[
            "4ranks-all_reduce_small",
            "2ranks-all_reduce_large",
            "4ranks-all_reduce_zero_copy",
            "2ranks-all_reduce_async",
            "4ranks-broadcast",
            "2ranks-all_to_all",
            "4ranks-ring",
        ],
    ),
)
def test_death_in_the_middle(size: int, call: Call) -> None:
    victim = size // 2
    survivors = Job(size).run(call, Fate(victim))
    assert_notified(survivors, victim, SOON_ON_THE_NODE, OPERATIONS[call])
    assert len({survivor.text for survivor in survivors}) == 1, survivors


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", cases([all_reduce_small, ring], quick=["all_reduce_small"]))
def test_a_rank_that_executes_another_program_has_died(ranks: int, call: Call) -> None:
    """A death shows before the process has ended. The kernel first frees the process's memory,
    which takes seconds if it is large. Here the process never ends."""
    survivors = Job(ranks).run(call, Fate(1, executes=True))
    assert_notified(survivors, 1, SOON_ON_THE_NODE, OPERATIONS[call])
    assert len({survivor.text for survivor in survivors}) == 1, survivors


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("call", "victim"),
    cases(
        [all_reduce_small, all_reduce_large],
        [0, 1, 3],
        quick=["all_reduce_small-0", "all_reduce_large-3"],
    ),
)
def test_the_error_has_the_number(ranks: int, victim: int, call: Call) -> None:
    """If a rank dies before its 30th operation, the errors name operation 30."""
    survivors = Job(ranks).run(call, Fate(victim, turn=30))
    assert_notified(survivors, victim, SOON_ON_THE_NODE, r"allreduce #30 \(SUM\)")
    assert len({survivor.text for survivor in survivors}) == 1, survivors


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "call", cases([all_reduce_small, all_reduce_large], quick=["all_reduce_small"])
)
def test_death_of_the_rank_that_serves_the_store(ranks: int, call: Call) -> None:
    survivors = Job(ranks).run(call, Fate(0), served_by_rank_0())
    assert_notified(survivors, 0, SOON_ON_THE_NODE, OPERATIONS[call])


@pytest.mark.ranks(3)
def test_child_that_outlives_the_dead_rank(ranks: int) -> None:
    survivors = Job(ranks).run(all_reduce_small, Fate(1, leaves_child=True))
    assert_notified(survivors, 1, SOON_ON_THE_NODE, "allreduce")


# Several nodes, and MPI everywhere.

LAYOUTS = ["aabb", "aaab", "abc"]
OVER_MPI = {"HBMCOMM_NODE": "mpi"}


@pytest.mark.parametrize(
    ("layout", "victim", "call"),
    cases(
        LAYOUTS,
        [0, -1],
        [all_reduce_small, all_reduce_large, broadcast, all_to_all_large, ring],
        quick=[
            "aabb-0-all_reduce_small",
            "aaab--1-all_to_all_large",
            "aaab--1-all_reduce_large",
            "abc-0-broadcast",
            "aabb--1-ring",
        ],
    ),
)
def test_death_on_another_node(layout: str, victim: int, call: Call) -> None:
    victim %= len(layout)
    survivors = Job(len(layout), layout).run(call, Fate(victim))
    assert_notified(survivors, victim, SOON_ELSEWHERE, OPERATIONS[call])


def last_rank_stays_away(folder: Path, call: Call, rank: int, size: int) -> None:
    """Do the operation. The last rank stays away from the second operation, and fails once rank 1
    has noticed a death."""
    came, notified = folder / "came", folder / "notified"
    if rank == size - 1 and came.exists():
        deadline = time.monotonic() + 2 * SOON_ELSEWHERE
        while not notified.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise RuntimeError("it stayed away")
    try:
        call(rank, size)
    except dist.DistBackendError:
        notified.touch()
        raise
    if rank == size - 1:
        came.touch()


def broadcast_from_0(rank: int, size: int) -> None:
    dist.broadcast(torch.ones(LARGE), 0)


def all_gather_large(rank: int, size: int) -> None:
    dist.all_gather_into_tensor(torch.ones(size * LARGE), torch.ones(LARGE))


@pytest.mark.parametrize(
    ("call", "job"),
    cases(
        [broadcast_from_0, all_reduce_large, all_gather_large],
        {"abc": Job(3, "abc"), "mpi": Job(3, environment=OVER_MPI)},
        quick=["broadcast_from_0-abc", "all_reduce_large-mpi"],
    ),
)
def test_a_late_rank_does_not_hide_a_death(job: Job, call: Call, tmp_path: Path) -> None:
    """Rank 0 dies when rank 1 has received rank 0's data and waits for rank 2, which is late."""
    waiting, _ = job.run(partial(last_rank_stays_away, tmp_path, call), Fate(0))
    assert_notified([waiting], 0, SOON_ELSEWHERE, rf"#2 .*{LARGE} float32")


def ring_while_rank_2_is_stopped(folder: Path, rank: int, size: int) -> None:
    """Run a ring. In the second ring, rank 2 is stopped until rank 1 has failed and left."""
    came, notified = folder / "came", folder / "notified"
    if rank == 2 and came.exists():
        left = f"until [ -e {notified} ]; do sleep 0.05; done; sleep 1"
        left += f"; until grep -q ') T ' /proc/{os.getpid()}/stat; do sleep 0.05; done"
        with subprocess.Popen(["sh", "-c", f"{left}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
    try:
        ring(rank, size)
    except dist.DistBackendError:
        if rank == 1:
            notified.touch()
        raise
    if rank == 2:
        came.touch()


@pytest.mark.full
def test_a_rank_failed_by_anothers_death_is_unnamed(tmp_path: Path) -> None:
    """The error of rank 2 names the dead rank 3, not rank 1.

    Rank 1 hears from rank 0 that rank 3 has died, and leaves before rank 2 runs again.
    """
    call = partial(ring_while_rank_2_is_stopped, tmp_path)
    survivors = Job(4, "baac").run(call, Fate(3))
    assert_notified(survivors, 3, 2 * SOON_ELSEWHERE, "send|recv")
    assert survivors[1].text == survivors[2].text


@pytest.mark.parametrize(
    ("victim", "call"),
    cases(
        [0, 1],
        [all_reduce_small, all_reduce_large, ring],
        quick=["0-all_reduce_small", "1-ring"],
    ),
)
def test_death_over_mpi(victim: int, call: Call) -> None:
    survivors = Job(3, environment=OVER_MPI).run(call, Fate(victim))
    assert_notified(survivors, victim, SOON_ELSEWHERE, OPERATIONS[call])


@pytest.mark.parametrize("layout", cases(["ab", "aab", "aabb"], quick=["aab"]))
def test_child_does_not_hide_a_death_on_another_node(layout: str) -> None:
    """The child of a node's first rank inherits the rank's connections to other nodes."""
    victim = layout.index("b")
    fate = Fate(victim, leaves_child=True)
    survivors = Job(len(layout), layout).run(all_reduce_small, fate)
    assert_notified(survivors, victim, SOON_ELSEWHERE, "allreduce")


@pytest.mark.parametrize(
    ("call", "job"),
    cases(
        [all_reduce_small, all_reduce_large],
        {
            "ab": Job(2, "ab"),
            "aabb": Job(4, "aabb"),
            "abc": Job(3, "abc"),
            "mpi": Job(4, environment=OVER_MPI),
        },
        quick=["all_reduce_small-aabb", "all_reduce_large-mpi"],
    ),
)
def test_death_of_the_store(job: Job, call: Call) -> None:
    """A rank that cannot know of the death names the lost store, and the ranks it waits for."""
    survivors = job.run(call, Fate(0), served_by_rank_0())
    report(survivors)
    for survivor in survivors:
        assert survivor.kind in ("DistBackendError", "DistNetworkError"), survivor
        assert re.search("has died|the store is gone", survivor.text), survivor
        assert survivor.seconds < SOON_ELSEWHERE, survivor


# Stopped ranks, and abort().


def test_a_timeout_names_the_rank_that_others_wait_for() -> None:
    """Rank 1 times out 50 ms before rank 0. Rank 1 waits for rank 0, and rank 0 for rank 2."""
    job = Job(3, "aab", timeout=2, hurried=1)
    survivors = job.run(all_reduce_small, Fate(2, signal.SIGSTOP, turn=10))
    report(survivors)
    for survivor in survivors:
        assert re.search(r"missing ranks: .*\b2 \(pid", survivor.text), survivor


@pytest.mark.parametrize(
    ("victim", "job"),
    cases(
        [0, 2],
        {"aaa": Job(3, timeout=2), "aab": Job(3, "aab", timeout=2)},
        quick=["0-aab", "2-aaa"],
    ),
)
def test_stopped_rank_is_named_by_the_timeout(job: Job, victim: int) -> None:
    survivors = job.run(all_reduce_small, Fate(victim, signal.SIGSTOP, turn=10))
    report(survivors)
    for survivor in survivors:
        assert survivor.kind == "DistBackendError", survivor
        assert "timed out after 2000 ms" in survivor.text, survivor
        assert re.search(rf"missing ranks: .*\b{victim} \(pid", survivor.text), survivor
        assert 1.5 < survivor.seconds < 2 + SOON_ELSEWHERE, survivor


def aborted_wait(context: Context, call: Callable[[], object]) -> None:
    """abort() on another thread ends the wait of rank 0, long before the timeout."""
    dist.barrier()
    if context.rank:
        return
    threading.Timer(0.2, _get_default_group().abort).start()
    with pytest.raises(dist.DistBackendError, match="was aborted on rank 0"):
        call()


def wait_small() -> None:
    dist.all_reduce(torch.ones(1))


def wait_zero_copy() -> None:
    dist.all_reduce(memory.empty(LARGE))


def wait_async() -> None:
    work = dist.broadcast(torch.ones(LARGE), 1, async_op=True)
    assert work is not None
    work.wait()


def wait_recv() -> None:
    dist.recv(torch.ones(1), 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "call",
    cases(
        [wait_small, wait_zero_copy, wait_async, wait_recv],
        quick=["wait_zero_copy", "wait_async"],
    ),
)
def test_abort_ends_a_wait(ranks: int, call: Callable[[], object]) -> None:
    pool = Pool(ranks)
    try:
        pool.run(aborted_wait, call)
        assert pool.close() == [0] * ranks
    finally:
        pool.kill()


# A rank that leaves.


def use_after_a_leave(pipe: Connection, rank: int, url: str) -> None:
    dist.init_process_group("hbm", init_method=url, rank=rank, world_size=3)
    dist.barrier()
    if rank == 2:
        dist.destroy_process_group()
        return
    pipe.recv()
    if rank == 0:
        dist.recv(torch.ones(1), 2)
    dist.all_reduce(torch.ones(1))


def test_a_report_names_a_leavers_waiting_rank(tmp_path: Path) -> None:
    """Rank 0's error calls rank 0 "this one". Rank 1's copy of this error begins with "rank 0"."""
    with Ranks(3, use_after_a_leave, f"file://{tmp_path}/store", layout="aab") as ranks:
        ranks.hear(2)
        ranks.tell(0)
        (own,) = ranks.hear(0)
        ranks.tell(1)
        (relayed,) = ranks.hear(1)
    finding = "was destroyed on a rank that this one waits for, rank 2 (pid "
    assert finding in own.text and finding in relayed.text, (own, relayed)
    assert relayed.text.startswith('group "0" has failed: rank 0: send/recv'), relayed


def refused_collectives(context: Context) -> list[str]:
    """Return the errors of an aborted group, for a synchronous and an asynchronous call."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    group.abort()
    errors = []
    for asynchronous in (False, True):
        with pytest.raises(dist.DistBackendError) as error:
            work = dist.all_reduce(torch.ones(1), group=group, async_op=asynchronous)
            assert work is not None
            work.wait()
        errors.append(str(error.value))
    return errors


def test_errors_name_operations_as_programs_do(fresh_pool: Pool) -> None:
    for errors in fresh_pool.run(refused_collectives):
        assert errors[0].startswith("all_reduce was refused because the group failed"), errors
        assert "hbm:" not in errors[1], errors
