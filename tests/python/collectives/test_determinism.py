"""Fixed reduction order: every rank in every run gets the bits of a loop over ranks in order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import LARGE_SIZES, assert_same, gathered, random_numbers, shared_out
from harness.reference import reduced

pytestmark = pytest.mark.conformance

SIZES = [1, 2, 3, 5, 17, 100, 1021, 4096, 30_011, 65_537, 131_072, *LARGE_SIZES]


def spread(context: Context, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of very different magnitude: a sum in another order has other last bits."""
    scale = torch.randint(-12, 12, (size,), generator=context.generator)
    return (random_numbers(context, size, torch.float32) * 2.0**scale).to(dtype)


def check_bits(context: Context, dtype: torch.dtype) -> None:
    inputs = [spread(context, size, dtype) for size in SIZES]
    totals: list[list[torch.Tensor]] = []
    for async_op in (False, True):
        totals.append([data.clone() for data in inputs])
        for total in totals[-1]:
            work = dist.all_reduce(total, async_op=async_op)
            if work is not None:
                work.wait()
    of_size = zip(SIZES, *(shared_out(context, each) for each in (inputs, *totals)), strict=True)
    for size, everyone, *attempts in of_size:
        expected = reduced(everyone, "sum") if everyone else None
        for attempt, got in enumerate(attempts):
            for rank, total in enumerate(got):
                assert expected is not None
                assert_same(total, expected, f"x {size}, attempt {attempt}, rank {rank}")


@beyond_gloo
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_all_reduce_has_one_result(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(check_bits, dtype, limit=240)


def check_offsets(context: Context) -> None:
    """The address of a tensor does not change its result."""
    base = spread(context, 5000, torch.float32)
    expected = reduced(gathered(context, base), "sum")
    for offset in range(1, 9):
        room = torch.zeros(5000 + offset)
        view = room[offset:]
        view.copy_(base)
        dist.all_reduce(view)
        assert_same(view, expected, f"offset {offset}")
        assert not room[:offset].any()


@beyond_gloo
def test_alignment_does_not_matter(pool: Pool) -> None:
    pool.run(check_offsets)


def check_agreement(context: Context) -> None:
    """Check that every collective that reduces gives the bits of all_reduce."""
    data = spread(context, 16 * context.size, torch.float32)
    total = data.clone()
    dist.all_reduce(total)
    mine = torch.empty(16)
    dist.reduce_scatter_tensor(mine, data.clone())
    assert_same(mine, total[16 * context.rank :][:16], "reduce_scatter_tensor")
    for root in range(context.size):
        copy = data.clone()
        dist.reduce(copy, root)
        if context.rank == root:
            assert_same(copy, total, f"reduce to {root}")


@beyond_gloo
def test_reductions_agree(pool: Pool) -> None:
    pool.run(check_agreement)
