"""Host copies of an accelerator's tensors in the segment that the ranks of a node share."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, accelerator, beyond_gloo
from harness.worker import log_path
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = [beyond_gloo, pytest.mark.ranks(2, 4)]

LARGE = 5 << 20  # bytes


def in_segment(context: Context) -> int:
    backend: Any = _get_default_group()._get_backend(torch.device(context.device))
    return int(backend.memory_stats()["segment.in_use_bytes"])


def check_host_copies(context: Context) -> None:
    """Check that large host copies are in the segment, pinned by registration, and reuse blocks."""
    delayed = accelerator.load()
    tensor = torch.zeros(LARGE // 4, device=context.device).fill_(context.rank + 1.0)
    before, counts = in_segment(context), delayed.pinned_counts()
    dist.all_reduce(tensor)
    held, after = in_segment(context), delayed.pinned_counts()
    assert held - before >= LARGE
    assert after["registered"] == counts["registered"] + 1
    assert after["allocated"] == counts["allocated"], "PyTorch's pinned memory was used too"
    for _ in range(5):
        delayed.synchronize()
        torch.accelerator.synchronize()
        dist.broadcast(tensor, 0)
    # An operation may allocate its block before the previous operation's block is free.
    assert in_segment(context) <= held + LARGE, "a block that no copy uses is not taken again"
    total = sum(range(1, context.size + 1))
    assert torch.equal(tensor.cpu(), torch.full((LARGE // 4,), float(total)))
    assert delayed.pinned_counts()["freed_in_copy"] == 0


def test_large_host_copies_are_in_the_segment(delayed_pool: Pool) -> None:
    delayed_pool.run(check_host_copies)


def check_current_device(context: Context) -> None:
    """Check that memory is pinned for the group's device, late:1, not for the current device."""
    delayed = accelerator.load()
    group = dist.new_group(backend="hbm")
    before = delayed.pinned_under(0)
    for count in (100, 150_000):  # in PyTorch's pinned memory, and in the segment
        tensor = torch.ones(count, device="late:1")
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor.cpu(), torch.full((count,), float(context.size)))
    assert delayed.current_device() == 0
    assert delayed.pinned_under(0) == before
    assert delayed.pinned_under(1) >= 2
    dist.destroy_process_group(group)


def test_pinning_is_under_the_groups_device(delayed_pool: Pool) -> None:
    delayed_pool.run(check_current_device)


def check_small(context: Context) -> None:
    delayed = accelerator.load()
    before = delayed.pinned_counts()
    dist.all_reduce(torch.ones(100, device=context.device))
    after = delayed.pinned_counts()
    assert after["registered"] == before["registered"]
    assert after["allocated"] == before["allocated"] + 1


def test_host_copies_below_64_kib_are_pytorchs(delayed_pool: Pool) -> None:
    delayed_pool.run(check_small)


def receives_until_none_is_left(group: dist.ProcessGroup, peer: int, taken: list[Any]) -> None:
    """Issue receives of messages that never come, until no staging memory is left."""
    while True:
        try:
            taken.append(dist.irecv(torch.empty(1), peer, group=group))
        except torch.OutOfMemoryError:
            return


def check_staging_is_kept(context: Context) -> None:
    """Check a large operation during which other threads take all free staging memory."""
    delayed = accelerator.load()
    delayed.set_longest_delay(0)
    peer = 1 - context.rank
    other = dist.new_group(backend="hbm")
    tensor = torch.full((1 << 20,), context.rank + 1.0, device=context.device)
    delayed.allow_copies(delayed.Direction.TO_HOST, 0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    taken: list[Any] = []
    receives_until_none_is_left(other, peer, taken)
    before = len(taken)
    over = threading.Event()

    def take() -> None:
        while not over.is_set() and len(taken) == before:
            receives_until_none_is_left(other, peer, taken)

    thieves = [threading.Thread(target=take) for _ in range(4)]
    for thief in thieves:
        thief.start()
    delayed.allow_copies(delayed.Direction.TO_HOST, -1)
    try:
        work.wait()
    finally:
        over.set()
        for thief in thieves:
            thief.join()
    assert torch.equal(tensor.cpu(), torch.full((1 << 20,), 3.0))


@pytest.mark.full
@pytest.mark.ranks(2)
def test_staging_memory_is_kept_from_chunk_to_chunk(ranks: int) -> None:
    pool = Pool(
        ranks,
        device=accelerator.NAME,
        environment={
            "HBMCOMM_DEVICE_CHUNK_BYTES": "4K",
            "HBMCOMM_NODE": "mpi",
            "HBMCOMM_MEMORY": "bind",
            "HBMCOMM_STAGING_BYTES": "256K",
            "MEMKIND_HBW_NODES": "0",
        },
    )
    try:
        pool.run(check_staging_is_kept)
    finally:
        pool.kill()


def check_pageable(context: Context) -> None:
    delayed = accelerator.load()
    delayed.pin_nothing()
    for count in (10, LARGE // 4, 4 * LARGE // 4):
        tensor = torch.full((count,), context.rank + 1.0, device=context.device)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        total = sum(range(1, context.size + 1))
        assert torch.equal(tensor.cpu(), torch.full((count,), float(total)))
    assert delayed.pinned_counts()["allocated"] == delayed.pinned_counts()["registered"] == 0
    said = "tensors on late:0 are copied by way of pageable memory"
    assert log_path(context.folder, context.rank).read_text().count(said) == 1


def test_no_pinned_memory(own_delayed_pool: Pool) -> None:
    own_delayed_pool.run(check_pageable)
