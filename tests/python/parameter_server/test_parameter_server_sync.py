"""The synchronous parameter server gives the numbers of one process that trains with all batches.

Every function runs on each rank of a pool; harness/synchronous.py has the shared functions.
"""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from harness import BACKEND, Context, Pool, beyond_gloo
from harness.data import assert_same
from harness.synchronous import (
    GROUPS,
    STEPS,
    Optimize,
    Uneven,
    adam,
    alone,
    assert_close,
    assert_replicated,
    backward,
    group_of,
    make,
    model_of,
    momentum,
    raised,
    serve_or_work,
    sgd,
    weights,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import memory
from torch_hbmcomm.parameter_server import sync_channel
from torch_hbmcomm.parameter_server.sync_channel import cut

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

# The same numbers as one process.


def check_equals_one_process(
    context: Context,
    group: str,
    optimize: Optimize,
    dtype: torch.dtype,
    tolerance: float,
    options: dict[str, Any],
) -> None:
    model = model_of(dtype=dtype)
    expected = alone(context, copy.deepcopy(model), optimize)
    if context.rank != options.get("server", 0):
        for parameter in model.parameters():  # the server's weights replace these
            parameter.data.fill_(3)
    ps = make(context, model, optimize, group=group_of(context, group), **options)

    def work(worker: int, workers: int) -> None:
        for step in range(STEPS):
            backward(model, context, step, worker, workers)
            ps.step()

    serve_or_work(ps, context, work, **options)
    assert_close(weights(model), expected, tolerance)
    assert_replicated(context, weights(model))
    assert ps.stats()["updates"] == STEPS
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert ps.stats()["gradient_bytes"] == STEPS * size
    assert ps.stats()["weight_bytes"] == (1 + STEPS) * size


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("optimize", [sgd, momentum, adam])
def test_equals_one_process(pool: Pool, group: str, optimize: Optimize) -> None:
    options = {"server": pool.size - 1}
    pool.run(check_equals_one_process, group, optimize, torch.float32, 1e-5, options)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("group", GROUPS)
def test_dtypes(pool: Pool, group: str, dtype: torch.dtype, tolerance: float) -> None:
    pool.run(check_equals_one_process, group, momentum, dtype, tolerance, {})


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("server", [0, 1])
def test_dedicated_server(pool: Pool, group: str, server: int) -> None:
    options = {"server": server, "dedicated": True}
    pool.run(check_equals_one_process, group, adam, torch.float32, 1e-5, options)


def check_equals_ddp(context: Context) -> None:
    replica = DistributedDataParallel(model_of(), process_group=group_of(context, BACKEND))
    optimizer = adam(replica.parameters())
    model = model_of()
    ps = make(context, model, adam)
    for step in range(STEPS):
        backward(replica, context, step, context.rank, context.size)
        optimizer.step()
        backward(model, context, step, context.rank, context.size)
        ps.step()
    ps.close()
    assert_close(weights(model), weights(replica.module), 1e-5)


def test_equals_ddp(pool: Pool) -> None:
    pool.run(check_equals_ddp)


def check_exact_mean(context: Context) -> None:
    """Average whole numbers in buckets of the usual size. One parameter is larger than a bucket."""
    larger = sync_channel.BUCKET_BYTES // 4 + 12_345
    model = nn.ParameterList([torch.zeros(17), torch.zeros(larger), torch.zeros(1, 3)])
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0), sync_channel.BUCKET_BYTES)
    pattern = [torch.arange(parameter.numel()) % 1000 for parameter in model]
    for parameter, numbers in zip(model, pattern, strict=True):
        parameter.grad = ((context.rank + 1) * context.size * numbers).view_as(parameter).float()
    ps.step()
    ps.close()
    total = context.size * (context.size + 1) // 2
    for parameter, numbers in zip(model, pattern, strict=True):
        assert_same(parameter.detach().view(-1), 0 - (total * numbers).float(), "weights")


def test_parameter_larger_than_a_bucket(pool: Pool) -> None:
    pool.run(check_exact_mean)


def check_halves_are_added_in_float(context: Context) -> None:
    """256 + 1 is not a bfloat16, so sums in bfloat16 would lose the ones."""
    model = nn.ParameterList([torch.zeros(5, dtype=torch.bfloat16)])
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0))
    model[0].grad = torch.full_like(model[0], 256.0 if context.rank == 0 else 1.0)
    ps.step()
    ps.close()
    mean = torch.tensor((256.0 + context.size - 1) / context.size)
    assert_same(model[0].detach(), -mean.to(torch.bfloat16).expand(5), "weights")


def test_halves_are_added_in_float(pool: Pool) -> None:
    pool.run(check_halves_are_added_in_float)


def check_memory_formats(context: Context) -> None:
    """Weights and rank 0's gradients are channels_last. Other ranks' gradients are contiguous."""
    torch.manual_seed(5)
    model = nn.Conv2d(3, 5, 2)
    model.weight.data = model.weight.data.to(memory_format=torch.channels_last)
    start = weights(model)
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0))
    pattern = torch.arange(60.0).view(5, 3, 2, 2)
    model.weight.grad = (
        pattern.clone() if context.rank else pattern.to(memory_format=torch.channels_last)
    )
    ps.step()
    ps.close()
    assert_same(model.weight.detach(), start[0] - pattern, "weight")
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_memory_formats(pool: Pool) -> None:
    pool.run(check_memory_formats)


# Which gradients count.


def check_missing_gradients(context: Context) -> None:
    """Parameter 0 has a gradient on every rank, 1 on the last rank alone, 2 on none."""
    model = nn.ParameterList([torch.ones(3), torch.ones(4), torch.ones(5)])
    expected = nn.ParameterList(copy.deepcopy(list(model)))
    ps = make(context, model, momentum)
    optimizer = momentum(expected.parameters())
    for _ in range(STEPS):
        model.zero_grad()
        model[0].grad = torch.ones(3)
        if context.rank == context.size - 1:
            model[1].grad = torch.ones(4)
        ps.step()
        expected[0].grad, expected[1].grad = torch.ones(3), torch.full((4,), 1 / context.size)
        optimizer.step()
    ps.close()
    assert_close(weights(model), weights(expected), 1e-6)
    assert_same(model[2].detach(), torch.ones(5), "a parameter that no rank used")
    assert ps.stats()["gradient_bytes"] == STEPS * 4 * (3 + 4)


def test_missing_gradients(pool: Pool) -> None:
    pool.run(check_missing_gradients)


def check_not_finite(context: Context, value: float) -> None:
    model = model_of()
    ps = make(context, model, adam)
    before = weights(model)
    for attempt in range(2):
        backward(model, context, 0, context.rank, context.size)
        if context.rank == context.size - 1:
            assert isinstance(model, Uneven) and model.second.weight.grad is not None
            model.second.weight.grad[1, 2] = value
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ps.step()
        warned = [w for w in caught if w.category is RuntimeWarning]
        assert len(warned) == (attempt == 0), warned
        if warned:
            assert f"second.weight on rank {context.size - 1} is not" in str(warned[0].message)
            assert warned[0].filename == __file__
    assert_close(weights(model), before, 0)
    assert (ps.stats()["refused"], ps.stats()["updates"]) == (2, 0)

    backward(model, context, 0, context.rank, context.size)
    ps.step()
    ps.close()
    reference = model_of()
    assert_close(weights(model), alone(context, reference, adam, steps=1), 1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(pool: Pool, value: float) -> None:
    pool.run(check_not_finite, value)


def check_large_but_finite(context: Context) -> None:
    """Check that gradients whose sum overflows count as finite."""
    model = nn.ParameterList([torch.zeros(4)])
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0))
    model[0].grad = torch.full((4,), 2.0**127 / context.size)
    ps.step()
    ps.close()
    assert ps.stats()["refused"] == 0
    assert torch.isfinite(model[0]).all() and (model[0] != 0).all()


def test_large_but_finite(pool: Pool) -> None:
    pool.run(check_large_but_finite)


def check_sparse(context: Context) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    ps = make(context, model)
    if context.rank == context.size - 1:
        model(torch.tensor([1, 2])).sum().backward()
    message = raised(TypeError, ps.step)
    assert f"parameter weight on rank {context.size - 1} is sparse" in message
    model.zero_grad()
    model.weight.grad = torch.ones_like(model.weight)
    ps.step()
    ps.close()
    assert ps.stats()["updates"] == 1


def test_sparse(pool: Pool) -> None:
    pool.run(check_sparse)


# Memory.


def check_in_segment(context: Context) -> None:
    def in_use() -> int:
        return sum(segment.in_use_bytes for segment in memory.info().segments)

    gc.collect()
    before = in_use()
    model = nn.ParameterList([torch.zeros(1 << 18)])
    ps = make(context, model, bucket_bytes=1 << 18)
    ranks = context.size if context.rank == 0 else 0
    assert in_use() - before >= 2 * (1 + ranks) * (1 << 18)
    ps.close()
    del ps
    gc.collect()
    assert in_use() == before


@beyond_gloo
def test_buffers_are_in_the_segment(pool: Pool) -> None:
    pool.run(check_in_segment)


@pytest.mark.parametrize("most", [8, 64, 1 << 20])
def test_buckets_hold_every_element_once(ranks: int, most: int) -> None:
    tensors = [
        torch.empty(size, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for size in (0, 1, 13, 100)
    ]
    seen = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]
    for bucket in cut(tensors, most):
        assert 0 < bucket.nbytes <= most
        for index, start, stop in bucket.spans:
            assert tensors[index].dtype == bucket.dtype
            seen[index][start:stop] += 1
    assert all((count == 1).all() for count in seen)
