"""Large operations on accelerator tensors, which hbm splits into chunks.

The result has the same bits as without chunks. While chunks are reduced, other chunks are copied in
both directions. The chunks share one sequence number, and errors concern the whole operation.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import SHORT_TIMEOUT, Context, Pool, RankFailure, accelerator, beyond_gloo
from harness.collectives import (
    Reduction,
    Tensors,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    broadcast,
    check_move,
    check_reduction,
    gather,
    moves_in_tiers,
    reductions_in_tiers,
    scatter,
)
from harness.data import assert_same, gathered, random_numbers
from harness.device_calls import check_random_calls
from harness.pool import DIED
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = [beyond_gloo, pytest.mark.ranks(2, 4)]

CHUNK = 16 << 10
CHUNKS = 12
COUNT = CHUNKS * CHUNK // 4  # of float32
ENVIRONMENT = {"HBMCOMM_DEVICE_CHUNK_BYTES": "16K"}
# Tensors of CHUNKED_COUNT elements are below 64 KiB, so their host copies come from PyTorch's
# pinned allocator. The test device counts the host copies that are freed during a transfer.
CHUNK_4K = {"HBMCOMM_DEVICE_CHUNK_BYTES": "4K"}
CHUNKED_COUNT = CHUNKS * 1024
WAIT_SECONDS = 60.0  # for quick events


@pytest.fixture(scope="module")
def chunk_pool(ranks: int) -> Iterator[Pool]:
    shared = Pool(ranks, device=accelerator.NAME, environment=ENVIRONMENT)
    yield shared
    assert not any(shared.close()), "a rank of the pool left with an error code"


@pytest.fixture
def own_chunk_pool(ranks: int) -> Iterator[Pool]:
    """Yield a pool for one test, which may harm the group. Kill the pool at the end."""
    own = Pool(ranks, device=accelerator.NAME, environment=CHUNK_4K)
    yield own
    own.kill()


@pytest.fixture
def impatient_chunk_pool(ranks: int) -> Iterator[Pool]:
    own = Pool(ranks, device=accelerator.NAME, environment=CHUNK_4K, timeout=SHORT_TIMEOUT)
    yield own
    own.kill()


MOVES = moves_in_tiers(
    (broadcast, all_gather, all_gather_into_tensor, gather, scatter), quick=(broadcast,)
)


@pytest.mark.parametrize("move", MOVES)
def test_move(chunk_pool: Pool, move: Callable[..., Tensors]) -> None:
    chunk_pool.run(check_move, move, limit=240)


@pytest.mark.parametrize(("reduction", "name"), reductions_in_tiers((all_reduce, "avg")))
def test_reduction(chunk_pool: Pool, reduction: Reduction, name: str) -> None:
    chunk_pool.run(check_reduction, reduction, name, limit=240)


def test_random_calls(chunk_pool: Pool) -> None:
    for _ in range(5):
        chunk_pool.run(check_random_calls, 2 * COUNT)


def await_copies(delayed: Any, direction: Any, count: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while delayed.copies(direction) < count:
        assert time.monotonic() < deadline, f"{delayed.copies(direction)} copies of {count}"
        time.sleep(0.001)


def check_chunks_go_back_early(context: Context) -> None:
    """Check that chunks are reduced and copied back before later chunks reach the host."""
    delayed = accelerator.load()
    tensor = torch.zeros(COUNT, device=context.device).fill_(context.rank + 1.0)
    delayed.synchronize()
    dist.barrier()
    before = delayed.copies(delayed.Direction.TO_DEVICE)
    delayed.allow_copies(delayed.Direction.TO_HOST, 3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    await_copies(delayed, delayed.Direction.TO_DEVICE, before + 3)
    time.sleep(0.05)
    assert delayed.copies(delayed.Direction.TO_DEVICE) == before + 3
    assert not work.is_completed()
    delayed.allow_copies(delayed.Direction.TO_HOST, -1)
    work.wait()
    total = sum(range(1, context.size + 1))
    assert torch.equal(tensor.cpu(), torch.full((COUNT,), float(total)))


def test_chunks_go_back_while_others_come(chunk_pool: Pool) -> None:
    chunk_pool.run(check_chunks_go_back_early)


def check_chunks_come_early(context: Context) -> None:
    """Check that all chunks of two operations are reduced on the host before any is copied back."""
    delayed = accelerator.load()
    tensors = [
        torch.zeros(COUNT, device=context.device).fill_((context.rank + 1.0) * each)
        for each in (1, 2)
    ]
    delayed.synchronize()
    dist.barrier()
    before = delayed.copies(delayed.Direction.TO_HOST)
    delayed.allow_copies(delayed.Direction.TO_DEVICE, 0)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    await_copies(delayed, delayed.Direction.TO_HOST, before + 2 * CHUNKS)
    for work in works:
        assert work is not None
        assert work.get_future().wait() is not None  # the last copy back is queued
        assert not work.is_completed()
    delayed.allow_copies(delayed.Direction.TO_DEVICE, -1)
    total = sum(range(1, context.size + 1))
    for each, tensor, work in zip((1, 2), tensors, works, strict=True):
        work.wait()
        assert torch.equal(tensor.cpu(), torch.full((COUNT,), float(total * each)))


def test_chunks_come_while_none_goes_back(chunk_pool: Pool) -> None:
    chunk_pool.run(check_chunks_come_early)


def check_one_operation(context: Context) -> None:
    group = _get_default_group()
    backend: Any = group._get_backend(torch.device(context.device))
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(COUNT, device=context.device))
    assert backend._get_sequence_number_for_group() == before + 1


def test_one_sequence_number(chunk_pool: Pool) -> None:
    chunk_pool.run(check_one_operation)


def check_mismatch(context: Context, counts: tuple[int, int], device: str) -> None:
    """Check that ranks that disagree raise errors about whole tensors, not about chunks."""
    count = counts[0] if context.rank == 0 else counts[1]
    tensor = torch.ones(count, device=device if context.rank == 0 else context.device)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(tensor)
    assert f"of {counts[0]} float32" in str(caught.value), str(caught.value)
    assert f"of {counts[1]} float32" in str(caught.value), str(caught.value)
    if counts[0] == counts[1]:
        assert "on an accelerator on one of them alone" in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "device"),
    [((COUNT, 2 * COUNT), "late"), ((10, COUNT), "late"), ((COUNT, COUNT), "cpu")],
    ids=["both cut", "one cut", "one on the CPU"],
)
@pytest.mark.ranks(2)
def test_mismatch(own_chunk_pool: Pool, counts: tuple[int, int], device: str) -> None:
    own_chunk_pool.run(check_mismatch, counts, device)


def check_timeout(context: Context) -> None:
    """Stop rank 0's device in the middle of an operation. No transfer's host copy is freed."""
    delayed = accelerator.load()
    tensor = torch.ones(CHUNKED_COUNT, device=context.device)
    dist.barrier(context.gloo)  # so no rank still loads modules
    dist.all_reduce(tensor)
    delayed.synchronize()
    if context.rank == 0:
        delayed.allow_copies(delayed.Direction.TO_HOST, 2)
    with pytest.raises(
        dist.DistBackendError,
        match=r"whose chunk [123] of 12 has not come from late:0|missing ranks: 0",
    ):
        dist.all_reduce(tensor)
    del tensor
    assert delayed.pinned_counts()["freed_in_copy"] == 0
    delayed.allow_copies(delayed.Direction.TO_HOST, -1)
    delayed.synchronize()
    assert delayed.pinned_counts()["freed_in_copy"] == 0


@pytest.mark.ranks(2)
def test_timeout_between_chunks(impatient_chunk_pool: Pool) -> None:
    impatient_chunk_pool.run(check_timeout)


def check_order_after_an_error(context: Context, async_op: bool) -> None:
    """Check that results of a failed operation do not overwrite a write that follows the error."""
    delayed = accelerator.load()
    tensor = torch.ones(CHUNKED_COUNT, device=context.device)
    dist.barrier(context.gloo)  # so no rank still loads modules
    dist.all_reduce(tensor)
    delayed.synchronize()
    delayed.allow_copies(delayed.Direction.TO_DEVICE, 0)
    if context.rank == 0:
        delayed.allow_copies(delayed.Direction.TO_HOST, 2)
    with pytest.raises(dist.DistBackendError):
        work = dist.all_reduce(tensor, async_op=async_op)
        assert work is not None
        work.wait()
    tensor.fill_(7.0)
    time.sleep(0.05)  # a late result would overwrite the tensor now
    delayed.allow_copies(delayed.Direction.TO_DEVICE, -1)
    delayed.allow_copies(delayed.Direction.TO_HOST, -1)
    torch.accelerator.synchronize()
    assert torch.equal(tensor.cpu(), torch.full((CHUNKED_COUNT,), 7.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_op", [False, pytest.param(True, marks=pytest.mark.full)])
def test_results_come_before_operations_after_an_error(
    impatient_chunk_pool: Pool, async_op: bool
) -> None:
    impatient_chunk_pool.run(check_order_after_an_error, async_op)


def check_lost(context: Context) -> None:
    """Lose rank 0's device in the middle of an operation, with copies in both directions queued."""
    delayed = accelerator.load()
    tensor = torch.ones(CHUNKED_COUNT, device=context.device)
    delayed.synchronize()
    dist.barrier()
    if context.rank == 0:
        before = delayed.copies(delayed.Direction.TO_DEVICE)
        delayed.allow_copies(delayed.Direction.TO_HOST, 4)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if context.rank == 0:
        await_copies(delayed, delayed.Direction.TO_DEVICE, before + 4)
        delayed.lose()
        delayed.allow_copies(delayed.Direction.TO_HOST, -1)
    with pytest.raises(RuntimeError, match="the test accelerator is lost"):
        work.wait()
    del tensor, work
    assert delayed.pinned_counts()["freed_in_copy"] == 0


@pytest.mark.ranks(2)
def test_device_lost_between_chunks(own_chunk_pool: Pool) -> None:
    own_chunk_pool.run(check_lost)


def check_death(context: Context) -> None:
    """Rank 1 dies after it has reduced some chunks. No other rank frees a buffer during a copy."""
    delayed = accelerator.load()
    tensor = torch.ones(CHUNKED_COUNT, device=context.device)
    delayed.synchronize()
    dist.barrier()
    before = delayed.copies(delayed.Direction.TO_DEVICE)
    if context.rank == 1:
        delayed.allow_copies(delayed.Direction.TO_HOST, 5)
    else:
        delayed.allow_copies(delayed.Direction.TO_DEVICE, 1)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if context.rank == 1:
        await_copies(delayed, delayed.Direction.TO_DEVICE, before + 5)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        work.wait()
    del tensor, work
    assert delayed.pinned_counts()["freed_in_copy"] == 0, "freed with a copy to the device queued"
    delayed.allow_copies(delayed.Direction.TO_DEVICE, -1)
    delayed.synchronize()
    assert delayed.pinned_counts()["freed_in_copy"] == 0


def test_rank_that_dies_between_chunks(own_chunk_pool: Pool) -> None:
    with pytest.raises(RankFailure) as caught:
        own_chunk_pool.run(check_death)
    assert caught.value.kinds == {1: DIED}, str(caught.value)


def check_gathered(context: Context) -> None:
    """Gather as FSDP does: the input, larger than a chunk, is this rank's part of the output."""
    data = random_numbers(context, COUNT, torch.float32)
    whole = torch.zeros(context.size * COUNT, device=context.device)
    part = whole[context.rank * COUNT : (context.rank + 1) * COUNT]
    part.copy_(data)
    dist.all_gather_into_tensor(whole, part)
    assert_same(whole.cpu(), torch.cat(gathered(context, data)), "all_gather_into_tensor")


def test_in_place(chunk_pool: Pool) -> None:
    chunk_pool.run(check_gathered)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("value", "error"),
    [("4095", "4095: the least is 4096"), ("much", "much is not a number of bytes")],
)
def test_chunk_bytes_that_make_no_sense(ranks: int, value: str, error: str) -> None:
    pool = Pool(ranks, device=accelerator.NAME, environment={"HBMCOMM_DEVICE_CHUNK_BYTES": value})
    pool.run(check_refused, f"HBMCOMM_DEVICE_CHUNK_BYTES={error}")
    pool.kill()


def check_refused(context: Context, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        dist.all_reduce(torch.ones(4, device=context.device))
