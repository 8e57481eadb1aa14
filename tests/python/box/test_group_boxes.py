"""The memory boxes of process groups: Options(parameter_server=...) and smb.of(group)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from harness import Context, Pool, RankFailure, beyond_gloo
from harness.box_process import TOKEN
from harness.events import await_rank, tell
from harness.group_boxes import SOON, TIMEOUT, assert_left, await_no_box, count_together, form
from harness.pool import DIED
from torch._C._distributed_c10d import FileStore

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import machine, smb
from torch_hbmcomm.box_process import BoxProcess

pytestmark = beyond_gloo


@pytest.fixture
def ranks_pool(ranks: int, socket_folder: Path) -> Iterator[Pool]:
    """Yield a bare pool, whose ranks must leave no socket behind."""
    pool = Pool(ranks, bare=True, environment={"HBMCOMM_SOCKET_DIR": str(socket_folder)})
    yield pool
    codes = pool.close()
    assert not any(codes), codes
    await_no_box(socket_folder)


# The box that rank 0 starts.


def use_and_destroy(context: Context, turns: int) -> None:
    for turn in range(turns):
        form(context, "auto", turn)
        box = smb.of()
        assert smb.all_of(dist.group.WORLD) == [box]
        stats = box.stats()
        assert stats["clients"] == context.size
        assert stats["segments"] == 0, "it is not the one of the turn before"
        dist.barrier()
        count_together(context, box)
        dist.destroy_process_group()
        assert box.closed


@pytest.mark.ranks(1, 2, 3, 4)
def test_box_on_rank_0(ranks_pool: Pool) -> None:
    ranks_pool.run(use_and_destroy, 2)


def held() -> tuple[int, int]:
    """Return the numbers of descriptors and of threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def exceeds(found: tuple[int, int], most: tuple[int, int]) -> bool:
    return any(one > bound for one, bound in zip(found, most, strict=True))


def make_and_destroy(
    context: Context, turns: int, most: list[tuple[int, int]] | None = None
) -> tuple[int, int]:
    """Return what the rank holds in the end. Waits up to a minute until it is at most `most`, by
    rank: threads that close descriptors and end are not waited for in destroy_process_group()."""
    form(context, "")
    for _ in range(turns):
        group = dist.new_group(pg_options=hbmcomm.Options(parameter_server="auto"))
        count_together(context, smb.of(group), group)
        dist.destroy_process_group(group)
    dist.barrier()
    found = held()
    until = time.monotonic() + 60
    while most and exceeds(found, most[context.rank]) and time.monotonic() < until:
        time.sleep(0.01)
        found = held()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.ranks(2)
def test_boxes_that_have_ended_hold_nothing(ranks_pool: Pool) -> None:
    early = ranks_pool.run(make_and_destroy, 3)
    late = ranks_pool.run(make_and_destroy, 20, early)
    assert not any(map(exceeds, late, early)), (early, late)


def use_default(context: Context) -> Any:
    os.environ["HBMCOMM_PARAMETER_SERVER"] = "auto"
    os.environ["HBMCOMM_BOX_MEMORY"] = "3MiB"
    form(context, None)
    capacity = smb.of().stats()["capacity_bytes"]
    none = dist.new_group(pg_options=hbmcomm.Options(parameter_server=""))
    dist.barrier()
    with pytest.raises(ValueError, match="no memory box"):
        smb.of(none)
    assert capacity == 3 << 20
    return hbmcomm.Options().parameter_server


@pytest.mark.ranks(2)
def test_environment_gives_the_default(ranks_pool: Pool) -> None:
    assert ranks_pool.run(use_default) == ["auto", "auto"]


def use_over_nodes(context: Context, layout: str) -> str:
    os.environ["HBMCOMM_NODE_ID"] = layout[context.rank]
    form(context, "auto")
    count_together(context, smb.of())
    url = smb.of().url
    dist.destroy_process_group()
    return url


@pytest.mark.parametrize(
    "layout",
    ["ab", "aabb", *(pytest.param(layout, marks=pytest.mark.full) for layout in ("aab", "abb"))],
)
def test_box_for_several_nodes(layout: str) -> None:
    pool = Pool(len(layout), bare=True)
    urls = pool.run(use_over_nodes, layout)
    assert not any(pool.close())
    for node, url in zip(layout, urls, strict=True):
        assert url.startswith("smb://127.0.0.1:") == (node == "a"), urls


# The box ends with the group, and not before.


def use_for_longer(context: Context, seconds: float) -> float:
    """Use the box for `seconds` on all ranks except rank 0, which destroys the group immediately.

    Returns the time of the rank's last use. On rank 0, returns the time at which
    destroy_process_group() was done.
    """
    form(context, "auto")
    cell = smb.of().alloc(8, key="late")
    start = time.monotonic()
    while context.rank > 0 and time.monotonic() - start < seconds:
        cell.fetch_add(0, 1)
    used = time.monotonic()
    dist.destroy_process_group()
    return used if context.rank > 0 else time.monotonic()


@pytest.mark.ranks(2, 4)
def test_box_stays_for_slower_ranks(ranks_pool: Pool) -> None:
    """Ranks use the box for longer than destroy_process_group() waits in a group without a box."""
    first, *others = ranks_pool.run(use_for_longer, 2.5)
    assert first >= max(others)


def outlive(context: Context) -> float:
    form(context, "auto")
    cell = smb.of().alloc(8, key="cell")
    dist.barrier()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    cell.fetch_add(0, 1)
    start = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - start


@pytest.mark.ranks(2, 3)
def test_killed_rank_holds_nobody_up(ranks: int, socket_folder: Path) -> None:
    pool = Pool(ranks, bare=True, environment={"HBMCOMM_SOCKET_DIR": str(socket_folder)})
    try:
        with pytest.raises(RankFailure) as raised:
            pool.run(outlive, limit=SOON)
        assert raised.value.kinds == {1: DIED}, raised.value
        await_no_box(socket_folder)
    finally:
        pool.kill()


def abort(context: Context) -> None:
    form(context, "auto")
    box = smb.of()
    dist.barrier()
    dist.distributed_c10d._abort_process_group()
    assert box.closed


@pytest.mark.ranks(1, 3)
def test_aborted_group_closes_its_box(ranks_pool: Pool) -> None:
    ranks_pool.run(abort)


def drop(context: Context) -> None:
    """Drop the last reference to a backend without shutting it down."""
    from torch_hbmcomm.backend import create

    group = SimpleNamespace(
        store=FileStore(str(context.folder / f"store{context.seed}"), context.size),
        group_rank=context.rank,
        group_size=context.size,
        timeout=timedelta(seconds=TIMEOUT),
        group_id="dropped",
        global_ranks_in_group=[],
    )
    backend = create(group, hbmcomm.Options(parameter_server="auto"))
    (box,) = backend.resource.boxes
    box.ping()
    backend.gather_texts("all have used it", str)
    del backend
    assert box.closed


@pytest.mark.ranks(1, 2)
def test_forgotten_group_closes_its_box(ranks_pool: Pool) -> None:
    ranks_pool.run(drop)


def fork_and_go_on(context: Context) -> None:
    form(context, "auto")
    child = os.fork()
    if child == 0:
        try:
            dist.destroy_process_group()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    count_together(context, smb.of())
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_forked_child_closes_nothing(ranks_pool: Pool) -> None:
    ranks_pool.run(fork_and_go_on)


def interrupt_the_wait(context: Context) -> None:
    form(context, "auto")
    box = smb.of()
    dist.barrier()
    if context.rank == 1:
        await_rank(context, "been interrupted", 0)
        box.ping()
        dist.destroy_process_group()
        return
    wait, waits = BoxProcess.wait, threading.Event()

    def watched(self: BoxProcess, timeout: float) -> bool:
        waits.set()
        return wait(self, timeout)

    def interrupt() -> None:
        waits.wait(SOON)
        os.kill(os.getpid(), signal.SIGINT)

    BoxProcess.wait = watched  # type: ignore[method-assign]
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        dist.destroy_process_group()
    assert box.closed
    tell(context, "been interrupted")


@pytest.mark.ranks(2)
def test_wait_can_be_interrupted(ranks: int, socket_folder: Path) -> None:
    pool = Pool(ranks, bare=True, environment={"HBMCOMM_SOCKET_DIR": str(socket_folder)})
    try:
        pool.run(interrupt_the_wait)
        await_no_box(socket_folder)
    finally:
        pool.kill()


# Groups of some of the ranks.


def use_subgroups(context: Context) -> None:
    form(context, "auto")
    members = list(range(1, context.size))
    options = hbmcomm.Options(parameter_server="auto", memory="ddr")
    group = dist.new_group(members, pg_options=options)
    plain = dist.new_group(pg_options=hbmcomm.Options(parameter_server=""))
    with pytest.raises(ValueError, match="no memory box"):
        smb.of(plain)
    if context.rank in members:
        own = smb.of(group)
        assert own.url != smb.of().url
        assert own.stats()["clients"] == len(members)
        count_together(context, own, group)
        dist.destroy_process_group(group)
        assert own.closed
        with pytest.raises(ValueError, match="has ended"):
            smb.of(group)
    else:
        with pytest.raises(ValueError, match="this rank is in"):
            smb.of(group)
    count_together(context, smb.of())

    half = hbmcomm.split_group(split_ranks=[[0], members])
    assert half is not None and smb.of(half).url != smb.of().url, "by the options of its parent"
    count_together(context, smb.of(half), half)
    dist.destroy_process_group()


@pytest.mark.ranks(2, 3, 4)
def test_subgroups_have_boxes_of_their_own(ranks_pool: Pool) -> None:
    ranks_pool.run(use_subgroups)


# Boxes that run already.


@pytest.fixture
def servers(socket_folder: Path) -> Iterator[list[smb.Server]]:
    with (
        smb.Server(token=TOKEN, unix=socket_folder / "one") as one,
        smb.Server(token=TOKEN, unix=socket_folder / "two") as two,
    ):
        yield [one, two]


def use_addresses(context: Context, wanted: str) -> list[str]:
    os.environ["HBMCOMM_TOKEN"] = TOKEN
    form(context, wanted)
    boxes = smb.all_of()
    assert smb.of() is boxes[0]
    for box in boxes:
        count_together(context, box)
    urls = [box.url for box in boxes]
    dist.destroy_process_group()
    assert all(box.closed for box in boxes)
    return urls


@pytest.mark.ranks(1, 2, 4)
def test_boxes_that_run_already(bare_pool: Pool, servers: list[smb.Server]) -> None:
    tcp = [server.urls[0] for server in servers]
    unix = [server.urls[-1] for server in servers]
    short = tcp[0] + "," + tcp[1].removeprefix("smb://")
    for urls, wanted in [
        (tcp, ",".join(tcp)),
        (tcp, short),
        (unix, ",".join(unix)),
        ([tcp[1], unix[0]], f"{tcp[1]},{unix[0]}"),
        ([unix[0]], unix[0]),
    ]:
        assert bare_pool.run(use_addresses, wanted) == [urls] * bare_pool.size
        for server in servers:
            assert_left(server)


# Groups without a box.


def ask_without_boxes(context: Context) -> None:
    with pytest.raises(ValueError, match="init_process_group first"):
        smb.of()
    form(context, None)
    with pytest.raises(ValueError, match=r'Options\(parameter_server="auto"\)'):
        smb.of()
    with pytest.raises(ValueError, match="gloo: only groups of"):
        smb.of(dist.new_group(backend="gloo"))
    with pytest.raises(ValueError, match="no process group"):
        smb.of("WORLD")  # type: ignore[arg-type]
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_groups_without_a_box(ranks_pool: Pool) -> None:
    ranks_pool.run(ask_without_boxes)


def test_no_torch_no_group() -> None:
    program = "from torch_hbmcomm import smb; smb.of()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ValueError: there is no default group" in ended.stderr


# How large a box is.

LIMITS: list[tuple[str, dict[str, str], int]] = [
    ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "7000", "a/b/memory.max": "9000"}, 7000),
    ("0::/hidden\n", {"memory.max": "5000"}, 5000),
    ("4:cpu:/x\n3:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "6000"}, 6000),
]


@pytest.mark.parametrize(("groups", "files", "least"), LIMITS)
def test_memory_is_limited_by_control_groups(
    groups: str, files: dict[str, str], least: int, tmp_path: Path, monkeypatch: Any
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    assert min(machine._limits(groups)) == least
    assert 0 < machine.memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
