"""Checks of messages between ranks of any group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness.context import Context
from harness.data import ALL_DTYPES, LARGE_SIZES, SMALL_SIZES, assert_same, random_bits, supported


def ring_peers(context: Context) -> tuple[int, int]:
    """Return the rank before this one and the rank after this one, in the ring of all ranks."""
    return (context.rank - 1) % context.size, (context.rank + 1) % context.size


def data_of(context: Context, sender: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the data that `sender` sends, which every rank can compute."""
    of_sender = Context(sender, context.size, None, context.folder, context.seed + size)
    return random_bits(of_sender, size, dtype)


def check_ring(context: Context) -> None:
    before, after = ring_peers(context)
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


def check_order(context: Context) -> None:
    before, after = ring_peers(context)
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


def check_mixed(context: Context) -> None:
    before, after = ring_peers(context)
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
