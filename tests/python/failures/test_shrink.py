"""torch.distributed.shrink_group over hbm, and the hooks for a group's failure."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.fates import Ranks

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

TIMEOUT = timedelta(seconds=60)


def form(rank: int, size: int, store: Path) -> None:
    dist.init_process_group(
        "hbm", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
    )


def backend() -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def total(group: dist.ProcessGroup | None = None) -> float:
    data = torch.full((70_000,), float(dist.get_rank(group) + 1))
    dist.all_reduce(data, group=group)
    assert (data == data[0]).all()
    return float(data[0])


def shrink_after_death(
    pipe: Connection, rank: int, layout: str, store: Path, victim: int, flags: int
) -> tuple[str, int, int, float]:
    form(rank, len(layout), store)
    total()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            total()
    except dist.DistBackendError as error:
        text = str(error)
    group = dist.shrink_group([victim], shrink_flags=flags)
    assert group is dist.group.WORLD
    result = (text, dist.get_rank(), dist.get_world_size(), total())
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("flags", [0, 1], ids=["default", "abort"])
@pytest.mark.parametrize(("layout", "victim"), [("aaa", 1), ("aabb", 0)])
def test_survivors_shrink_the_group(layout: str, victim: int, flags: int, tmp_path: Path) -> None:
    size = len(layout)
    with Ranks(
        size, shrink_after_death, layout, tmp_path / "store", victim, flags, layout=layout
    ) as ranks:
        living = [rank for rank in range(size) if rank != victim]
        for number, said in enumerate(ranks.hear(*living)):
            assert not said.error, said
            text, rank, count, found = said.value
            assert f"rank {victim} (pid {ranks.processes[victim].pid} on" in text
            assert (rank, count) == (number, size - 1)
            assert found == size * (size - 1) / 2


def shrink_the_healthy(pipe: Connection, rank: int, store: Path) -> Any:
    form(rank, 3, store)
    total()
    part = dist.new_group([0, 1, 2])
    if rank == 2:
        pipe.recv()
        errors = []
        for group in (part, None):
            try:
                total(group)
            except dist.DistBackendError as error:
                errors.append(str(error))
        return errors
    smaller = dist.shrink_group([2], group=part)
    result = [total(smaller), dist.get_world_size(smaller)]
    dist.shrink_group([2])
    return [*result, total(), dist.get_world_size()]


def test_an_excluded_rank_that_lives_gets_an_error(tmp_path: Path) -> None:
    with Ranks(3, shrink_the_healthy, tmp_path / "store") as ranks:
        for said in ranks.hear(0, 1):
            assert said.value == [3.0, 2, 3.0, 2], said
        ranks.tell(2)
        (said,) = ranks.hear(2)
        assert len(said.value) == 2, said
        assert all("was shrunk" in text or "left" in text for text in said.value), said


def shrink_wrongly(pipe: Connection, rank: int, store: Path) -> list[str]:
    form(rank, 2, store)
    errors = []
    for excluded in ([5], [-1], [rank]):
        try:
            backend().shrink(excluded)
        except ValueError as error:
            errors.append(str(error))
    assert total() == 3.0  # the group is as it was
    dist.destroy_process_group()
    return errors


def test_wrong_ranks_are_refused(tmp_path: Path) -> None:
    with Ranks(2, shrink_wrongly, tmp_path / "store") as ranks:
        for rank, said in enumerate(ranks.hear(0, 1)):
            assert not said.error, said
            assert "rank 5 is not in" in said.value[0]
            assert "rank -1 is not in" in said.value[1]
            assert f"rank {rank} of" in said.value[2]
            assert "only the remaining ranks call it" in said.value[2]


# -- abort hooks -----------------------------------------------------------------------------------


def hooked(pipe: Connection, rank: int, store: Path, way: str) -> Any:
    """Register hooks, and fail. Returns the events, in their order."""
    os.dup2(os.open(store.with_name(f"printed{rank}"), os.O_CREAT | os.O_WRONLY), 2)
    form(rank, 2, store)
    events: list[str] = []
    work: Any = None

    def note() -> None:
        events.append("hook" + ("" if work is None or not work.is_completed() else " too late"))

    def fail() -> None:
        events.append("bad hook")
        raise LookupError("this hook is bad")

    group = backend()
    group.register_abort_hook(2, note)
    group.register_abort_hook(1, fail)
    group.register_abort_hook(3, note)
    group.unregister_abort_hook(3)
    group.unregister_abort_hook(7)
    try:
        group.register_abort_hook(2, note)
    except (ValueError, RuntimeError) as error:
        events.append(str(error))
    total()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL) if way == "death" else pipe.recv()
        return []
    work = dist.all_reduce(torch.ones(70_000), async_op=True)
    if way == "abort":
        group.abort()
    try:
        work.wait()
    except dist.DistBackendError:
        events.append("error")
    group.abort()
    return events


@pytest.mark.parametrize("way", ["death", "abort"])
def test_each_abort_hook_is_called_once_before_pending_works_fail(way: str, tmp_path: Path) -> None:
    with Ranks(2, hooked, tmp_path / "store", way) as ranks:
        (said,) = ranks.hear(0)
        assert not said.error, said
        refusal, *events = said.value
        assert "id 2 is registered already" in refusal
        assert events == ["bad hook", "hook", "error"]
    printed = (tmp_path / "printed0").read_text()
    assert "the abort hook 1 of" in printed and "LookupError: this hook is bad" in printed
