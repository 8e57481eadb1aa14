"""monitored_barrier names ranks that have died, are late or have left. It does not wait for ranks
that cannot come."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.cases import cases
from harness.deaths import (
    SOON_ELSEWHERE,
    SOON_ON_THE_NODE,
    Fate,
    Job,
    assert_notified,
    report,
    served_by_rank_0,
)
from harness.fates import Ranks, Said
from torch._C._distributed_c10d import FileStore, Store

from torch_hbmcomm import monitored_barrier

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def meet_at_barrier(pipe: Connection, rank: int, size: int, url: str, timeouts: list[float]) -> str:
    """Wait for a message, call a barrier, send its error, and return the error.

    After another message, check that the group still works.
    """
    dist.init_process_group(
        "hbm",
        init_method=url,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    pipe.send("ready")
    pipe.recv()
    error = ""
    try:
        monitored_barrier(timeout=timedelta(seconds=timeouts[rank]))
    except RuntimeError as raised:
        error = str(raised)
    pipe.send(error)
    pipe.recv()
    monitored_barrier()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert (tensor == size).all()
    return error


def assert_all_continue(ranks: Ranks, size: int) -> None:
    ranks.tell(*range(size))
    said = ranks.hear(*range(size))
    assert [each.error for each in said] == [""] * size, said


def verdicts(texts: list[str]) -> set[str]:
    """Return the errors without the words that differ between ranks by design."""
    return {
        re.sub(r"; (Rank \d+ (timed out|failed|successfully)|Ranks ).*", "", text) for text in texts
    }


@pytest.mark.parametrize("layout", ["aaa", "abb"])
def test_a_late_rank_0_raises_the_other_ranks_verdict(layout: str, url: str) -> None:
    with Ranks(3, meet_at_barrier, 3, url, [60, 0.5, 60], layout=layout) as ranks:
        ranks.hear(0, 1, 2)
        ranks.tell(2)  # first: rank 1 waits for half a second only
        ranks.tell(1)
        came = ranks.hear(1, 2)
        ranks.tell(0)
        late = ranks.hear(0)
        assert_all_continue(ranks, 3)
    (verdict,) = verdicts([*came, *late])
    assert re.match(r"monitored_barrier of .* timed out after 500 ms; missing ranks: 0 ", verdict)
    assert "Rank 0 failed to pass monitoredBarrier" in late[0], late
    assert "Rank 2 successfully reached monitoredBarrier" in came[1], came


@pytest.mark.parametrize("layout", ["aaa", "abb"])
def test_the_first_deadline_ends_a_barrier_for_all(layout: str, url: str) -> None:
    with Ranks(3, meet_at_barrier, 3, url, [60, 1, 60], layout=layout) as ranks:
        ranks.hear(0, 1, 2)
        ranks.tell(0, 1)
        came = ranks.hear(0, 1)
        ranks.tell(2)
        late = ranks.hear(2)
        assert_all_continue(ranks, 3)
    (verdict,) = verdicts([*came, *late])
    # On a busy machine rank 0 may be late too.
    assert re.match(
        r"monitored_barrier of .* timed out after 1000 ms; missing ranks: [02] ", verdict
    )


def pass_monitored_barrier(rank: int, size: int) -> None:
    monitored_barrier()


@pytest.mark.parametrize(
    ("layout", "victim"),
    cases(["aaa", "aab"], [0, 1, 2], quick=["aaa-0", "aaa-2", "aab-0", "aab-2"]),
)
def test_does_not_wait_for_the_dead(layout: str, victim: int) -> None:
    survivors = Job(3, layout).run(pass_monitored_barrier, Fate(victim))
    bound = SOON_ON_THE_NODE if layout == "aaa" else SOON_ELSEWHERE
    assert_notified(survivors, victim, bound, r"^monitored_barrier of group \S+: rank")
    reached = "successfully reached monitoredBarrier, but received errors while waiting"
    for survivor in survivors:
        if survivor.rank == 0:  # Gloo's words
            assert f"Rank {victim} failed to pass monitoredBarrier in" in survivor.text, survivor
        else:
            assert f"Rank {survivor.rank} {reached}" in survivor.text, survivor


def test_the_death_of_the_stores_host_is_named() -> None:
    survivors = Job(3).run(pass_monitored_barrier, Fate(0), served_by_rank_0())
    report(survivors)
    for survivor in survivors:
        assert survivor.kind in ("DistBackendError", "DistNetworkError"), survivor
        death = r"(?s)^monitored_barrier of .*rank 0 \(pid .* has died"
        assert re.search(death, survivor.text), survivor
        assert survivor.seconds < SOON_ON_THE_NODE, survivor


def die_amid_a_write(pipe: Connection, rank: int, path: Path) -> None:
    dist.init_process_group("hbm", init_method=f"file://{path}", rank=rank, world_size=3)
    monitored_barrier()
    pipe.send("passed one")
    pipe.recv()
    if rank == 0:
        with path.open("ab") as store:
            store.write((100).to_bytes(8, sys.byteorder))  # the length of a key that does not come
        os.kill(os.getpid(), signal.SIGKILL)
    monitored_barrier(timeout=timedelta(seconds=60))


@pytest.mark.parametrize(
    ("layout", "order"),
    [("aaa", [(0,), (1, 2)]), ("aab", [(1, 2), (0,)])],
    ids=["first", "while the others wait"],
)
def test_a_death_amid_a_file_write_is_named(
    layout: str, order: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """PyTorch's FileStore never answers after a rank has died while it wrote the file."""
    with Ranks(3, die_amid_a_write, tmp_path / "store", layout=layout) as ranks:
        ranks.hear(0, 1, 2)
        for those in order:
            ranks.tell(*those)
            time.sleep(0.3)
        said = ranks.hear(1, 2, limit=20)
    for each in said:
        print(each.text)
        assert each.error == "DistBackendError", each
        assert re.search(r"^monitored_barrier of group \S+: rank 0 \(pid .* has died", each.text)


def name_all_the_missing(pipe: Connection, rank: int, url: str, timeout: float) -> None:
    dist.init_process_group("hbm", init_method=url, rank=rank, world_size=4)
    pipe.send("ready")
    pipe.recv()
    monitored_barrier(timeout=timedelta(seconds=timeout), wait_all_ranks=True)


@pytest.mark.parametrize(
    ("dead", "late", "timeout"), [([1, 3], [], 60), ([3], [1], 3)], ids=["dead", "dead-and-late"]
)
def test_names_all_the_missing(dead: list[int], late: list[int], timeout: float, url: str) -> None:
    """Wait for all live ranks, by wait_all_ranks, and name all missing ranks."""
    with Ranks(4, name_all_the_missing, url, timeout) as ranks:
        ranks.hear(*range(4))
        for rank in dead:
            ranks.signal(rank, signal.SIGKILL)
        ranks.tell(0, 2)
        said = ranks.hear(0, 2, limit=30)
    print([each.text for each in said])
    for each in said:
        assert each.error == "DistBackendError", each
        named = re.findall(r"rank (\d) \(pid \d+ on \S+\) has died", each.text)
        assert named == [str(rank) for rank in dead], each
        missing = re.findall(r"missing ranks: 1 \(pid \d+ on \S+\), 3 \(pid \d+ on", each.text)
        assert len(missing) == len(late), each
    assert "Ranks 1, 3 failed to pass monitoredBarrier in" in said[0].text, said


class DecidedStore(Store):
    """A store in which rank 2 has claimed a barrier's decision before this rank claims it.

    Rank 2 publishes its verdict when this rank has asked for it twice.
    """

    VERDICT = "8 1 2\nmonitored_barrier of rank 2"

    def __init__(self, below: Store) -> None:
        super().__init__()
        self.below = below
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        self.below.set(key, value)

    def get(self, key: str) -> bytes:
        return self.below.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.below.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.below.compare_set(key, expected, "2" if key.endswith("/decider") else desired)

    def check(self, keys: list[str]) -> bool:
        prefix, _, word = keys[0].rpartition("/")
        if word == "verdict" and self.below.check([f"{prefix}/decider"]):
            self.asked += 1
            if self.asked == 3:
                self.below.set(keys[0], self.VERDICT)
        return self.below.check(keys)


def pass_one_that_is_decided(pipe: Connection, rank: int, path: Path) -> None:
    store: Store = FileStore(str(path), 3)
    if rank == 0:
        store = DecidedStore(store)
    dist.init_process_group("hbm", store=store, rank=rank, world_size=3)
    pipe.send("ready")
    pipe.recv()
    monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)


def test_a_death_does_not_hide_another_ranks_verdict(tmp_path: Path) -> None:
    """Rank 0 and rank 2 time out together. Rank 2 decides, so rank 0 raises rank 2's verdict."""
    with Ranks(3, pass_one_that_is_decided, tmp_path / "store") as ranks:
        ranks.hear(0, 1, 2)
        ranks.signal(1, signal.SIGKILL)
        ranks.tell(0)
        (said,) = ranks.hear(0, limit=60)
    assert said.error == "DistBackendError", said
    assert said.text.startswith("monitored_barrier of rank 2; "), said
    assert "Ranks 1, 2 failed to pass monitoredBarrier in" in said.text, said


def leave_or_pass(pipe: Connection, rank: int, url: str, leaving: list[int], all_: bool) -> None:
    """Destroy the group on the ranks `leaving`; call monitored_barrier on the others.

    A leaving rank 1 ends immediately; other leaving ranks stay.
    """
    dist.init_process_group("hbm", init_method=url, rank=rank, world_size=3)
    if rank not in leaving:
        monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=all_)
        return
    dist.destroy_process_group()
    if rank != 1:
        pipe.send(Said(None, "", "", time.monotonic()))
        pipe.recv()


@pytest.mark.parametrize(
    ("layout", "fate"),
    cases(
        ["aaa", "aab"],
        {
            "0": ([0], "successfully reached monitoredBarrier, but received errors while waiting"),
            "1": ([1], "Rank 1 failed to pass monitoredBarrier in 60000 ms"),
            "2": ([2], "Rank 2 failed to pass monitoredBarrier in 60000 ms"),
            "1-2": ([1, 2], "Ranks 1, 2 failed to pass monitoredBarrier in 60000 ms"),
        },
        quick=["aaa-0", "aaa-1-2", "aab-1-2", "aab-2"],
    ),
)
def test_does_not_wait_for_those_who_left(
    layout: str, fate: tuple[list[int], str], url: str
) -> None:
    """Each remaining rank names the ranks that left.

    The error of the lowest remaining rank also has Gloo's words.
    """
    leaving, words = fate
    with Ranks(3, leave_or_pass, url, leaving, len(leaving) > 1, layout=layout) as ranks:
        left = max(each.at for each in ranks.hear(*leaving))
        said = ranks.hear(*(rank for rank in range(3) if rank not in leaving))
    print([(each.error, round(each.at - left, 3), each.text) for each in said])
    for each in said:
        assert each.error == "DistBackendError", each
        named = re.findall(r"rank (\d) \(pid \d+ on \S+\) has destroyed the group", each.text)
        assert named == list(map(str, leaving)), each
        assert each.at - left < (SOON_ON_THE_NODE if layout == "aaa" else SOON_ELSEWHERE), each
    assert words in said[0].text, said
