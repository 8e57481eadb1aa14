"""Every collective, dtype, operator and size.

Results of moves (collectives that only copy data) are compared with Gloo's, results of reductions
with NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.collectives import (
    Reduction,
    Tensors,
    all_gather,
    all_gather_into_stacked_tensor,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    all_to_all_single_unequal,
    broadcast,
    check_move,
    check_objects,
    check_reduction,
    check_sparse,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from harness.data import assert_reduced, assert_same, gathered, random_numbers
from harness.reference import meaningless_for, reduce_op, reduced, supported_operators

pytestmark = pytest.mark.conformance

MOVES = [
    broadcast,
    all_gather,
    all_gather_into_tensor,
    pytest.param(all_gather_into_stacked_tensor, marks=beyond_gloo),
    gather,
    scatter,
    all_to_all_single,
    all_to_all_single_unequal,
    pytest.param(all_to_all, marks=beyond_gloo),
]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_move(pool: Pool, move: Callable[..., Tensors]) -> None:
    pool.run(check_move, move, limit=120)


@pytest.mark.parametrize("name", supported_operators())
@pytest.mark.parametrize(
    "reduction",
    [all_reduce, reduce, reduce_scatter, reduce_scatter_tensor],
    ids=lambda reduction: reduction.__name__,
)
def test_reduction(pool: Pool, reduction: Reduction, name: str) -> None:
    pool.run(check_reduction, reduction, name, limit=120)


def check_meaningless(context: Context, name: str) -> None:
    for dtype in meaningless_for(name):
        data = random_numbers(context, 5, dtype) if dtype.itemsize > 1 else torch.ones(5).to(dtype)
        with pytest.raises(ValueError, match=f"(?i){str(dtype).removeprefix('torch.')}|complex"):
            dist.all_reduce(data, reduce_op(name))
    dist.barrier()


@beyond_gloo
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", supported_operators())
def test_operator_without_meaning_is_an_error(pool: Pool, name: str) -> None:
    pool.run(check_meaningless, name)


# Layouts.


def strided(data: torch.Tensor) -> torch.Tensor:
    """Return the same values with gaps of one element between them."""
    spaced = data.new_zeros((*data.shape, 2))
    spaced[..., 0] = data
    return spaced[..., 0]


def check_strided(context: Context) -> None:
    dtype, size, shape = torch.float32, context.size, (7, 11)
    data = random_numbers(context, shape, dtype)
    inputs = gathered(context, data)
    total = reduced(inputs, "sum")

    for layout in (strided(data), data.t().contiguous().t()):
        dist.all_reduce(layout)
        assert_reduced(layout.contiguous(), total, "all_reduce")
    spaced = strided(data)
    dist.all_reduce(spaced)
    assert not spaced.as_strided(shape, spaced.stride(), 1).any(), "a gap was written to"

    copy = strided(data)
    dist.broadcast(copy, size - 1)
    assert_same(copy.contiguous(), inputs[-1], "broadcast")
    outputs = [strided(torch.zeros(shape)) for _ in range(size)]
    dist.all_gather(outputs, strided(data))
    for rank, output in enumerate(outputs):
        assert_same(output.contiguous(), inputs[rank], f"all_gather from {rank}")
    output = strided(torch.zeros(shape))
    dist.reduce_scatter(output, [strided(data) for _ in range(size)])
    assert_reduced(output.contiguous(), total, "reduce_scatter")
    dist.scatter(output, [strided(data) for _ in range(size)] if context.rank == 0 else None, 0)
    assert_same(output.contiguous(), inputs[0], "scatter")


@beyond_gloo
@pytest.mark.every_size
def test_strided_tensors(pool: Pool) -> None:
    pool.run(check_strided)


def check_scalars(context: Context) -> None:
    data = torch.tensor(float(context.rank + 1))
    dist.all_reduce(data)
    assert data.item() == context.size * (context.size + 1) / 2 and data.shape == ()
    got = [torch.tensor(0.0) for _ in range(context.size)]
    dist.all_gather(got, torch.tensor(float(context.rank)))
    assert [value.item() for value in got] == list(range(context.size))


def test_tensors_of_no_dimension(pool: Pool) -> None:
    pool.run(check_scalars)


def check_repeated_sync(context: Context) -> None:
    for step in range(300):
        data = torch.full((4,), float(step + context.rank))
        dist.all_reduce(data)
        expected = context.size * step + context.size * (context.size - 1) / 2
        assert data.tolist() == [expected] * 4, (step, data)
        dist.barrier()


@pytest.mark.every_size
def test_many_small_in_a_row(pool: Pool) -> None:
    pool.run(check_repeated_sync)


# Sparse all_reduce and object collectives.


def test_sparse_all_reduce(pool: Pool) -> None:
    pool.run(check_sparse)


def test_object_collectives(pool: Pool) -> None:
    pool.run(check_objects)
