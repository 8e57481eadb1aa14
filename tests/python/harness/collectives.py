"""Checks of every collective, dtype, operator and size, on any ranks.

Results of moves (collectives that only copy data) are compared with Gloo's, results of reductions
with NumPy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet
from torch.distributed.distributed_c10d import _get_default_group

from harness.context import Context
from harness.data import (
    ALL_DTYPES,
    LARGE_SIZES,
    MEDIUM_SIZE,
    SMALL_SIZES,
    assert_reduced,
    assert_same,
    bits,
    gathered,
    placed,
    random_bits,
    random_numbers,
    shared_out,
    supported,
)
from harness.reference import operands_of, reduce_op, reduced, supported_operators

Group = dist.ProcessGroup | None
Tensors = list[torch.Tensor]


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


def matrix(context: Context, dtypes: list[torch.dtype]) -> Iterator[tuple[torch.dtype, int, bool]]:
    """Yield cases of a dtype, a size and async_op. Only a few dtypes have larger sizes.

    async_op alternates; for the largest sizes it is random.
    """
    usable = supported(dtypes)
    cases = list(itertools.product(usable, SMALL_SIZES))
    cases += [(dtype, MEDIUM_SIZE) for dtype in (torch.int64, torch.bfloat16) if dtype in usable]
    for index, (dtype, size) in enumerate(cases):
        yield dtype, size, index % 2 == 0
    if torch.float32 in usable:
        for size in LARGE_SIZES if context.size <= 4 else LARGE_SIZES[:1]:
            yield torch.float32, size, context.shared_random.random() < 0.5


# Moves. Each function takes this rank's data, and returns the rank's result. The data's first index
# is the element. Gloo gets each element as a row of bytes.


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
    """Return how many of `count` elements `sender` sends to each rank: unequal numbers, some 0."""
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


# Moves that Gloo lacks, each with a move over Gloo that gives the same bytes.
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
        got = [tensor.cpu() for tensor in move(context, None, placed(context, data), async_op)]
        expected_bits = torch.cat([bits(t) for t in expected]) if expected else raw[:0].flatten()
        got_bits = torch.cat([bits(t) for t in got]) if got else raw[:0].flatten()
        assert_same(got_bits, expected_bits, what)


# Reductions. Each function takes this rank's data and returns the rank's result.


def all_reduce(context: Context, data: torch.Tensor, op: Any, async_op: bool) -> torch.Tensor:
    if data.dtype.is_complex:  # torch.distributed itself refuses some meaningful operators
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = op, async_op
        _get_default_group().allreduce([data], options).wait()
    else:
        finish(dist.all_reduce(data, op, async_op=async_op))
    return data


def reduce(context: Context, data: torch.Tensor, op: Any, async_op: bool) -> torch.Tensor:
    finish(dist.reduce(data, context.size // 2, op, async_op=async_op))
    return data


def reduce_scatter(context: Context, data: torch.Tensor, op: Any, async_op: bool) -> torch.Tensor:
    parts = [data.roll(shift, 0) for shift in range(context.size)]
    got = torch.empty_like(data)
    finish(dist.reduce_scatter(got, parts, op, async_op=async_op))
    return got


def reduce_scatter_tensor(
    context: Context, data: torch.Tensor, op: Any, async_op: bool
) -> torch.Tensor:
    whole = torch.cat([data.roll(shift, 0) for shift in range(context.size)])
    got = torch.empty_like(data)
    finish(dist.reduce_scatter_tensor(got, whole, op, async_op=async_op))
    return got


Reduction = Callable[[Context, torch.Tensor, Any, bool], torch.Tensor]


def moves_in_tiers(
    moves: Collection[Callable[..., Tensors]], quick: Collection[Callable[..., Tensors]]
) -> list[ParameterSet]:
    """Return parameters of check_move(); parameters outside `quick` are for the full tier."""
    return [
        pytest.param(move, id=move.__name__, marks=() if move in quick else pytest.mark.full)
        for move in moves
    ]


def reductions_in_tiers(quick: tuple[Reduction, str]) -> list[ParameterSet]:
    """Return parameters of check_reduction(): every reduction with every operator.

    All except `quick` are for the full tier.
    """
    return [
        pytest.param(
            reduction,
            name,
            id=f"{reduction.__name__}-{name}",
            marks=() if (reduction, name) == quick else pytest.mark.full,
        )
        for reduction in (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor)
        for name in supported_operators()
    ]


def share(
    context: Context, reduction: Reduction, rank: int, total: torch.Tensor
) -> torch.Tensor | None:
    """Return the part of the reduced data `total` that `rank` must get, or None if it gets none."""
    if reduction is all_reduce:
        return total
    if reduction is reduce:
        return total if rank == context.size // 2 else None
    return total.roll(rank, 0)


def check_reduction(
    context: Context,
    reduction: Reduction,
    name: str,
    reference: Callable[[list[torch.Tensor], str], torch.Tensor] = reduced,
) -> None:
    """Check that each rank gets the result of `reference` for all ranks' data."""
    cases = list(matrix(context, operands_of(name)))
    inputs, results = [], []
    for dtype, size, async_op in cases:
        data = random_numbers(context, size, dtype, small=name in ("product", "premul_sum"))
        inputs.append(data.clone())
        results.append(reduction(context, placed(context, data), reduce_op(name), async_op).cpu())
    of_case = zip(cases, shared_out(context, inputs), shared_out(context, results), strict=True)
    for (dtype, size, async_op), everyone, got in of_case:
        if not everyone:
            continue
        total = reference(everyone, name)
        for rank, result in enumerate(got):
            expected = share(context, reduction, rank, total)
            if expected is not None:
                what = f"{dtype} x {size}, async_op={async_op}, rank {rank}"
                assert_reduced(result, expected, what)


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
