"""Point to point: every dtype, order between two ranks, tags, any source, batches, strides."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import assert_same
from harness.messages import (
    check_any_source,
    check_blocking,
    check_mixed,
    check_order,
    check_ring,
    ring_peers,
)

pytestmark = [pytest.mark.conformance, pytest.mark.ranks(2, 3, 4, 8)]


def test_ring_of_every_dtype(pool: Pool) -> None:
    pool.run(check_ring, limit=120)


def test_blocking_send_and_recv(pool: Pool) -> None:
    pool.run(check_blocking)


def test_messages_between_two_ranks_keep_their_order(pool: Pool) -> None:
    pool.run(check_order)


def check_tags(context: Context) -> None:
    before, after = ring_peers(context)
    sends = [dist.isend(torch.tensor([float(tag)]), after, tag=tag) for tag in range(6)]
    got = {tag: torch.empty(1) for tag in range(6)}
    for tag in reversed(range(6)):
        dist.recv(got[tag], before, tag=tag)
    for work in sends:
        assert work is not None
        work.wait()
    assert all(tensor.item() == tag for tag, tensor in got.items())


def test_tags_tell_messages_apart(pool: Pool) -> None:
    pool.run(check_tags)


def test_recv_from_any_source_names_the_sender(pool: Pool) -> None:
    pool.run(check_any_source)


def check_any_source_async(context: Context) -> None:
    if context.rank == 0:
        got = [torch.empty(2) for _ in range(context.size - 1)]
        works = [dist.irecv(tensor) for tensor in got]
        senders = []
        for tensor, work in zip(got, works, strict=True):
            assert work is not None
            work.wait()
            assert work._source_rank() == int(tensor[0].item())
            senders.append(work._source_rank())
        assert sorted(senders) == list(range(1, context.size))
    else:
        dist.send(torch.full((2,), float(context.rank)), 0)
    dist.barrier()


def test_irecv_from_any_source(pool: Pool) -> None:
    pool.run(check_any_source_async)


def check_batch(context: Context, size: int) -> None:
    everyone = [rank for rank in range(context.size) if rank != context.rank]
    got = {rank: torch.empty(size) for rank in everyone}
    operations = [dist.P2POp(dist.irecv, got[rank], rank) for rank in everyone]
    operations += [
        dist.P2POp(dist.isend, torch.full((size,), 100.0 * context.rank + rank), rank)
        for rank in everyone
    ]
    context.own_random.shuffle(operations)
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for rank, tensor in got.items():
        assert_same(tensor, torch.full((size,), 100.0 * rank + context.rank), f"from {rank}")


@pytest.mark.parametrize("size", [1, 300_000])
@pytest.mark.every_size
def test_batch_of_all_pairs(pool: Pool, size: int) -> None:
    pool.run(check_batch, size)


def check_strided(context: Context) -> None:
    before, after = ring_peers(context)
    sent = dist.isend(torch.arange(20.0).reshape(4, 5).t() + context.rank, after)
    spaced = torch.zeros(5, 4, 2)
    dist.recv(spaced[..., 0], before)
    assert sent is not None
    sent.wait()
    assert_same(spaced[..., 0].contiguous(), torch.arange(20.0).reshape(4, 5).t() + before, "recv")
    assert not spaced[..., 1].any(), "a gap was written to"


@beyond_gloo
def test_strided_tensors(pool: Pool) -> None:
    pool.run(check_strided)


def test_messages_between_collectives(pool: Pool) -> None:
    pool.run(check_mixed)


def check_large(context: Context) -> None:
    size = 500_000
    if context.rank == 0:
        for _ in range(3):
            dist.send(torch.arange(float(size)), 1)
    elif context.rank == 1:
        time.sleep(0.2)  # the sender comes first
        for _ in range(3):
            got = torch.empty(size)
            dist.recv(got, 0)
            assert_same(got, torch.arange(float(size)), "late")
    dist.barrier()


def test_large_messages_in_a_row(pool: Pool) -> None:
    pool.run(check_large)
