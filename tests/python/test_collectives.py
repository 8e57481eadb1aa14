"""Every collective, dtype, operator and size, against Gloo (moves) and NumPy (reductions)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import (
    ALL_DTYPES,
    LARGE_SIZES,
    MEDIUM_SIZE,
    SMALL_SIZES,
    assert_reduced,
    assert_same,
    bits,
    gathered,
    random_bits,
    random_numbers,
    supported,
)
from harness.reference import (
    meaningless_for,
    operands_of,
    reduce_op,
    reduced,
    supported_operators,
)
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = pytest.mark.conformance

Group = dist.ProcessGroup | None
Tensors = list[torch.Tensor]


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


def matrix(context: Context, dtypes: list[torch.dtype]) -> Iterator[tuple[torch.dtype, int, bool]]:
    """Each dtype with each small size, every other one asynchronous; a few dtypes with more."""
    usable = supported(dtypes)
    cases = list(itertools.product(usable, SMALL_SIZES))
    cases += [(dtype, MEDIUM_SIZE) for dtype in (torch.int64, torch.bfloat16) if dtype in usable]
    for index, (dtype, size) in enumerate(cases):
        yield dtype, size, index % 2 == 0
    if torch.float32 in usable:
        for size in LARGE_SIZES if context.size <= 4 else LARGE_SIZES[:1]:
            yield torch.float32, size, context.shared_random.random() < 0.5


# Moves. Each takes this rank's data, whose first dimension counts elements, and returns what the
# rank got. Over the backend under test it runs on the dtype, over Gloo on the elements' bytes.


def broadcast(context: Context, group: Group, data: torch.Tensor, async_op: bool) -> Tensors:
    got = [data.clone() for _ in range(context.size)]
    for root, tensor in enumerate(got):
        finish(dist.broadcast(tensor, root, group=group, async_op=async_op))
    return got


def all_gather(context: Context, group: Group, data: torch.Tensor, async_op: bool) -> Tensors:
    got = [torch.empty_like(data) for _ in range(context.size)]
    finish(dist.all_gather(got, data, group=group, async_op=async_op))
    return got


def all_gather_into_tensor(
    context: Context, group: Group, data: torch.Tensor, async_op: bool
) -> Tensors:
    got = data.new_empty((context.size * len(data), *data.shape[1:]))
    finish(dist.all_gather_into_tensor(got, data, group=group, async_op=async_op))
    return [got]


def all_gather_into_stacked_tensor(
    context: Context, group: Group, data: torch.Tensor, async_op: bool
) -> Tensors:
    got = data.new_empty((context.size, *data.shape))
    finish(dist.all_gather_into_tensor(got, data, group=group, async_op=async_op))
    return [got]


def gather(context: Context, group: Group, data: torch.Tensor, async_op: bool) -> Tensors:
    root = context.size - 1
    got = [torch.empty_like(data) for _ in range(context.size)] if context.rank == root else []
    finish(dist.gather(data, got or None, root, group=group, async_op=async_op))
    return got


def scatter(context: Context, group: Group, data: torch.Tensor, async_op: bool) -> Tensors:
    root = context.size // 2
    parts = [data.roll(shift, 0) for shift in range(context.size)] if context.rank == root else None
    got = torch.empty_like(data)
    finish(dist.scatter(got, parts, root, group=group, async_op=async_op))
    return [got]


def all_to_all_single(
    context: Context, group: Group, data: torch.Tensor, async_op: bool
) -> Tensors:
    data = data[: len(data) // context.size * context.size]
    got = torch.empty_like(data)
    finish(dist.all_to_all_single(got, data, group=group, async_op=async_op))
    return [got]


def split(context: Context, sender: int, count: int) -> list[int]:
    """How many of `count` elements the sender sends to each rank: unequal, and some of them 0."""
    weights = [(sender + 2 * receiver) % 3 for receiver in range(context.size)]
    return [count * weight // (3 * context.size) for weight in weights]


def received(context: Context, count: int) -> list[int]:
    return [split(context, sender, count)[context.rank] for sender in range(context.size)]


def all_to_all_single_unequal(
    context: Context, group: Group, data: torch.Tensor, async_op: bool
) -> Tensors:
    give, take = split(context, context.rank, len(data)), received(context, len(data))
    got = data.new_empty((sum(take), *data.shape[1:]))
    finish(
        dist.all_to_all_single(
            got, data[: sum(give)].clone(), take, give, group=group, async_op=async_op
        )
    )
    return [got]


def all_to_all(context: Context, group: Group, data: torch.Tensor, async_op: bool) -> Tensors:
    give, take = split(context, context.rank, len(data)), received(context, len(data))
    parts = [part.clone() for part in data[: sum(give)].split(give)]
    got = [data.new_empty((count, *data.shape[1:])) for count in take]
    finish(dist.all_to_all(got, parts, group=group, async_op=async_op))
    return got


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
# What moves the same bytes over Gloo, where Gloo lacks the operation.
BY_GLOO: dict[str, Callable[..., Tensors]] = {
    "all_to_all": all_to_all_single_unequal,
    "all_gather_into_stacked_tensor": all_gather_into_tensor,
}


def check_move(context: Context, move: Callable[..., Tensors]) -> None:
    for dtype, size, async_op in matrix(context, ALL_DTYPES):
        what = f"{dtype} x {size}, async_op={async_op}"
        data = random_bits(context, size, dtype)
        raw = bits(data).reshape(size, dtype.itemsize)
        over_gloo = BY_GLOO.get(move.__name__, move)
        expected = over_gloo(context, context.gloo, raw.clone(), False)
        got = move(context, None, data.clone(), async_op)
        expected_bits = torch.cat([bits(t) for t in expected]) if expected else raw[:0].flatten()
        got_bits = torch.cat([bits(t) for t in got]) if got else raw[:0].flatten()
        assert_same(got_bits, expected_bits, what)


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_move(pool: Pool, move: Callable[..., Tensors]) -> None:
    pool.run(check_move, move, limit=120)


# Reductions. Each takes this rank's data and returns pairs (what the rank got, all ranks' inputs
# that it is the reduction of).

Pairs = list[tuple[torch.Tensor, Tensors]]


def all_reduce(context: Context, data: torch.Tensor, op: Any, async_op: bool) -> Pairs:
    inputs = gathered(context, data)
    if data.dtype.is_complex:  # torch.distributed itself refuses some of what has a meaning
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = op, async_op
        _get_default_group().allreduce([data], options).wait()
    else:
        finish(dist.all_reduce(data, op, async_op=async_op))
    return [(data, inputs)]


def reduce(context: Context, data: torch.Tensor, op: Any, async_op: bool) -> Pairs:
    inputs, root = gathered(context, data), context.size // 2
    finish(dist.reduce(data, root, op, async_op=async_op))
    return [(data, inputs)] if context.rank == root else []


def reduce_scatter(context: Context, data: torch.Tensor, op: Any, async_op: bool) -> Pairs:
    parts = [data.roll(shift, 0) for shift in range(context.size)]
    inputs = [other.roll(context.rank, 0) for other in gathered(context, data)]
    got = torch.empty_like(data)
    finish(dist.reduce_scatter(got, parts, op, async_op=async_op))
    return [(got, inputs)]


def reduce_scatter_tensor(context: Context, data: torch.Tensor, op: Any, async_op: bool) -> Pairs:
    whole = torch.cat([data.roll(shift, 0) for shift in range(context.size)])
    inputs = [other.roll(context.rank, 0) for other in gathered(context, data)]
    got = torch.empty_like(data)
    finish(dist.reduce_scatter_tensor(got, whole, op, async_op=async_op))
    return [(got, inputs)]


def check_reduction(context: Context, reduction: Callable[..., Pairs], name: str) -> None:
    for dtype, size, async_op in matrix(context, operands_of(name)):
        small = name in ("product", "premul_sum")
        data = random_numbers(context, size, dtype, small=small)
        for got, inputs in reduction(context, data, reduce_op(name), async_op):
            what = f"{dtype} x {size}, async_op={async_op}"
            assert_reduced(got, reduced(inputs, name), what)


@pytest.mark.parametrize("name", supported_operators())
@pytest.mark.parametrize(
    "reduction",
    [all_reduce, reduce, reduce_scatter, reduce_scatter_tensor],
    ids=lambda reduction: reduction.__name__,
)
def test_reduction(pool: Pool, reduction: Callable[..., Pairs], name: str) -> None:
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
    """The same values with gaps of one element between them."""
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


def test_many_small_in_a_row(pool: Pool) -> None:
    pool.run(check_repeated_sync)


# Sparse all_reduce and object collectives.


def check_sparse(context: Context) -> None:
    dense = torch.zeros(50, 3)
    rows = torch.randperm(50, generator=context.generator)[: 5 + context.rank]
    dense[rows] = torch.randint(-9, 9, (len(rows), 3), generator=context.generator).float()
    expected = torch.stack(gathered(context, dense)).sum(0)
    for sparse in (dense.to_sparse(), dense.to_sparse(1), torch.zeros(50, 3).to_sparse()):
        empty = sparse._nnz() == 0
        dist.all_reduce(sparse)
        torch.testing.assert_close(sparse.to_dense(), expected * 0 if empty else expected)


def test_sparse_all_reduce(pool: Pool) -> None:
    pool.run(check_sparse)


def check_objects(context: Context) -> None:
    mine = {"rank": context.rank, "blob": "x" * (1000 * context.rank)}
    everyone: list[Any] = [None] * context.size
    dist.all_gather_object(everyone, mine)
    assert [item["rank"] for item in everyone] == list(range(context.size))
    assert len(everyone[-1]["blob"]) == 1000 * (context.size - 1)

    objects = [context.rank, ("a", context.rank)]
    dist.broadcast_object_list(objects, src=context.size - 1)
    assert objects == [context.size - 1, ("a", context.size - 1)]

    collected: list[Any] | None = [None] * context.size if context.rank == 0 else None
    dist.gather_object(mine["rank"], collected, dst=0)
    assert collected is None or collected == list(range(context.size))

    part: list[Any] = [None]
    parts = [{"for": rank} for rank in range(context.size)] if context.rank == 0 else None
    dist.scatter_object_list(part, parts, src=0)
    assert part == [{"for": context.rank}]


def test_object_collectives(pool: Pool) -> None:
    pool.run(check_objects)
