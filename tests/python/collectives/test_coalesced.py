"""Coalesced collectives and the coalescing manager: many tensors in one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Context, Pool, beyond_gloo
from harness.data import assert_reduced, assert_same, gathered, random_bits, random_numbers
from harness.reference import reduced
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_group

pytestmark = pytest.mark.conformance

# Elements: none, a few, and more than a staging chunk. Gloo refuses the empty tensor.
SIZES = ([] if BACKEND == "gloo" else [0]) + [1, 3, 1021, 300_000]


def numbers(context: Context, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [random_numbers(context, size, dtype) for size in SIZES]


def check_all_reduce_coalesced(context: Context) -> None:
    for async_op in (False, True):
        data = numbers(context)
        expected = [reduced(gathered(context, tensor), "sum") for tensor in data]
        work = dist.all_reduce_coalesced(data, async_op=async_op)
        if work is not None:
            work.wait()
        for tensor, total in zip(data, expected, strict=True):
            assert_reduced(tensor, total, f"x {tensor.numel()}, async_op={async_op}")


def check_all_reduce_coalesced_aliases(context: Context) -> None:
    """Check that each of several overlapping tensors is reduced with its data before the call."""
    for async_op in (False, True):
        data = random_numbers(context, 3000, torch.float32)
        total = reduced(gathered(context, data), "sum")
        views = [data, data, data[1000:], data[:10]]
        work = dist.all_reduce_coalesced(views, async_op=async_op)
        if work is not None:
            work.wait()
        assert_reduced(data, total, f"async_op={async_op}")


def check_all_gather_coalesced(context: Context) -> None:
    data = numbers(context)
    expected = [gathered(context, tensor) for tensor in data]
    got = [[torch.empty_like(tensor) for tensor in data] for _ in range(context.size)]
    dist.all_gather_coalesced(got, data)
    for rank, tensors in enumerate(got):
        for index, tensor in enumerate(tensors):
            assert_same(tensor, expected[index][rank], f"tensor {index} of rank {rank}")


def check_all_gather_into_tensor_coalesced(context: Context) -> None:
    data = numbers(context)
    got = [tensor.new_empty(context.size * tensor.numel()) for tensor in data]
    _get_default_group().allgather_into_tensor_coalesced(got, data).wait()
    for tensor, whole in zip(data, got, strict=True):
        assert_same(whole, torch.cat(gathered(context, tensor)), f"x {tensor.numel()}")


def check_reduce_scatter_tensor_coalesced(context: Context) -> None:
    wholes = [random_numbers(context, context.size * size, torch.float32) for size in SIZES]
    expected = [reduced(gathered(context, whole), "sum") for whole in wholes]
    got = [torch.empty(size) for size in SIZES]
    _get_default_group().reduce_scatter_tensor_coalesced(got, wholes).wait()
    for part, total in zip(got, expected, strict=True):
        mine = total[context.rank * len(part) :][: len(part)]
        assert_reduced(part, mine, f"x {len(part)}")


@pytest.mark.parametrize(
    "check",
    [
        check_all_reduce_coalesced,
        check_all_reduce_coalesced_aliases,
        check_all_gather_coalesced,
        check_all_gather_into_tensor_coalesced,
        check_reduce_scatter_tensor_coalesced,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_coalesced(pool: Pool, check: Callable[..., Any]) -> None:
    pool.run(check)


def check_dtypes_together(context: Context) -> None:
    """A coalesced call may have tensors of several dtypes if it reduces nothing."""
    dtypes = [torch.int8, torch.bfloat16, torch.float64, torch.bool]
    data = [random_bits(context, 33, dtype) for dtype in dtypes]
    got = [tensor.new_empty(context.size * 33) for tensor in data]
    _get_default_group().allgather_into_tensor_coalesced(got, data).wait()
    for tensor, whole in zip(data, got, strict=True):
        assert_same(whole, torch.cat(gathered(context, tensor)), str(tensor.dtype))


@beyond_gloo
def test_several_dtypes_in_one_call(pool: Pool) -> None:
    pool.run(check_dtypes_together)


def check_manager(context: Context, kind: str, async_ops: bool) -> None:
    data = numbers(context)
    wholes = [random_numbers(context, context.size * size, torch.float32) for size in SIZES]
    expected: list[torch.Tensor]
    got: list[torch.Tensor]
    if kind == "all_reduce":
        expected = [reduced(gathered(context, tensor), "sum") for tensor in data]
        got = data
    elif kind == "all_gather":
        expected = [torch.cat(gathered(context, tensor)) for tensor in data]
        got = [torch.empty_like(whole) for whole in wholes]
    else:
        totals = [reduced(gathered(context, whole), "sum") for whole in wholes]
        expected = [
            total[context.rank * size :][:size] for total, size in zip(totals, SIZES, strict=True)
        ]
        got = [torch.empty(size) for size in SIZES]

    with _coalescing_manager(async_ops=async_ops) as manager:
        for tensor, whole, output in zip(data, wholes, got, strict=True):
            if kind == "all_reduce":
                dist.all_reduce(tensor)
            elif kind == "all_gather":
                dist.all_gather_into_tensor(output, tensor)
            else:
                dist.reduce_scatter_tensor(output, whole)
    if async_ops:
        manager.wait()
    for output, wanted in zip(got, expected, strict=True):
        assert_reduced(output, wanted, f"{kind} x {wanted.numel()}")


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_coalescing_manager(pool: Pool, kind: str, async_ops: bool) -> None:
    pool.run(check_manager, kind, async_ops)


def check_manager_p2p(context: Context) -> None:
    before, after = (context.rank - 1) % context.size, (context.rank + 1) % context.size
    got = torch.empty(5)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((5,), float(context.rank)), after)
        dist.irecv(got, before)
    manager.wait()
    assert got.tolist() == [float(before)] * 5


@beyond_gloo
@pytest.mark.ranks(2, 3, 4, 8)
def test_coalescing_manager_around_messages(pool: Pool) -> None:
    pool.run(check_manager_p2p)
