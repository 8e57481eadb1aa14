"""Point to point: every dtype, order between two ranks, tags, any source, batches, strides."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import ALL_DTYPES, LARGE_SIZES, SMALL_SIZES, assert_same, random_bits, supported

pytestmark = [pytest.mark.conformance, pytest.mark.ranks(2, 3, 4, 8)]


def neighbours(context: Context) -> tuple[int, int]:
    """(the rank before this one, the rank after it) in the ring of all ranks."""
    return (context.rank - 1) % context.size, (context.rank + 1) % context.size


def data_of(context: Context, sender: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What `sender` sends: every rank can compute it."""
    twin = Context(sender, context.size, None, context.folder, context.seed + size)
    return random_bits(twin, size, dtype)


def check_ring(context: Context) -> None:
    before, after = neighbours(context)
    cases = [(dtype, size) for dtype in supported(ALL_DTYPES) for size in SMALL_SIZES]
    cases += [(torch.float32, size) for size in LARGE_SIZES]
    for dtype, size in cases:
        got = torch.zeros(size, dtype=torch.uint8).to(dtype)
        sent = dist.isend(data_of(context, context.rank, size, dtype), after)
        received = dist.irecv(got, before)
        assert sent is not None and received is not None
        received.wait()
        sent.wait()
        assert_same(got, data_of(context, before, size, dtype), f"{dtype} x {size}")


def test_ring_of_every_dtype(pool: Pool) -> None:
    pool.run(check_ring, limit=120)


def check_blocking(context: Context) -> None:
    for size in (0, 1, 5, 100_000):
        for sender in range(context.size):
            if context.rank == sender:
                for peer in range(context.size):
                    if peer != sender:
                        dist.send(data_of(context, sender, size, torch.float32), peer)
            else:
                got = torch.empty(size)
                assert dist.recv(got, sender) == sender
                assert_same(got, data_of(context, sender, size, torch.float32), f"x {size}")


def test_blocking_send_and_recv(pool: Pool) -> None:
    pool.run(check_blocking)


def check_order(context: Context) -> None:
    before, after = neighbours(context)
    count = 50
    sends = [dist.isend(torch.full((3,), float(step)), after) for step in range(count)]
    got = [torch.empty(3) for _ in range(count)]
    receives = [dist.irecv(tensor, before) for tensor in got]
    works = sends + receives
    context.own_random.shuffle(works)
    for work in works:
        assert work is not None
        work.wait()
    assert [tensor[0].item() for tensor in got] == list(range(count))


def test_messages_between_two_ranks_keep_their_order(pool: Pool) -> None:
    pool.run(check_order)


def check_tags(context: Context) -> None:
    before, after = neighbours(context)
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


def check_any_source(context: Context) -> None:
    if context.rank == 0:
        seen = []
        for _ in range(2 * (context.size - 1)):
            got = torch.empty(4)
            sender = dist.recv(got)
            assert got.tolist() == [float(sender)] * 4, (sender, got)
            seen.append(sender)
        assert sorted(seen) == sorted(2 * list(range(1, context.size)))
    else:
        for _ in range(2):
            dist.send(torch.full((4,), float(context.rank)), 0)
    dist.barrier()


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
def test_batch_of_all_pairs(pool: Pool, size: int) -> None:
    pool.run(check_batch, size)


def check_strided(context: Context) -> None:
    before, after = neighbours(context)
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


def check_mixed(context: Context) -> None:
    before, after = neighbours(context)
    for step in range(30):
        total = torch.ones(100)
        reduction = dist.all_reduce(total, async_op=True)
        sent = dist.isend(torch.tensor([float(step)]), after)
        got = torch.empty(1)
        dist.recv(got, before)
        assert reduction is not None and sent is not None
        reduction.wait()
        sent.wait()
        assert got.item() == step and total[0].item() == context.size


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
