"""A group's properties, and the memory that it gives out."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.segments import in_segment
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm

pytestmark = beyond_gloo


def backend() -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def check_profiler_ranges(context: Context) -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(10))
        dist.broadcast(torch.ones(10), 0, async_op=True).wait()
        dist.barrier()
    names = {event.key for event in profile.key_averages()}
    assert {"hbm:all_reduce", "hbm:broadcast", "hbm:barrier", "record_param_comms"} <= names


def check_profiler_shapes(context: Context) -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        if context.rank == 0:
            dist.send(torch.ones(3, 3), 1)
            dist.send(torch.ones(3, 3), 1)
        elif context.rank == 1:
            dist.recv(torch.ones(3, 3), 0)
            dist.recv(torch.ones(3, 3))
        data = [torch.ones(2, 2), torch.ones(5)]
        got = [[torch.empty_like(tensor) for tensor in data] for _ in range(context.size)]
        dist.all_gather_coalesced(got, data)
        dist.all_gather_coalesced(got, data, async_op=True).wait()
    shapes: dict[str, list[Any]] = {}
    for event in profile.events() or []:
        shapes.setdefault(event.name, []).append(event.input_shapes)
    if context.rank == 0:
        assert shapes["hbm:send"] == [[[3, 3]]] * 2
    elif context.rank == 1:
        assert shapes["hbm:recv"] == [[[3, 3]]]
        assert shapes["hbm:recvAnySource"] == [[[3, 3]]]
    assert shapes["hbm:all_gather"] == [[[2, 2], [5]]] * 2


def check_memory_from_the_group(context: Context) -> None:
    group = backend()
    assert group.supports_tensor_alloc(torch.device("cpu"))
    before = settled_bytes()
    tensor = group.allocate_tensor(1000, dtype=torch.float64, device=torch.device("cpu"))
    assert tensor.shape == (1000,) and tensor.dtype == torch.float64
    tensor.fill_(context.rank)
    assert group.memory_stats()["segment.in_use_bytes"] == before + 8000
    assert sum(hbmcomm.memory.where(tensor).values()) == 8000
    dist.all_reduce(tensor)
    assert (tensor == sum(range(context.size))).all()
    del tensor
    await_bytes(before)


def settled_bytes() -> int:
    """Return the bytes in use in the segment, after objects of earlier tests have gone.

    A worker thread may hold the last reference to a tensor for a moment.
    """
    gc.collect()
    read: list[int] = [backend().memory_stats()["segment.in_use_bytes"]]
    deadline = time.monotonic() + 60
    while len(read) < 10 or len(set(read[-10:])) > 1:
        assert time.monotonic() < deadline, read[-10:]
        time.sleep(0.01)
        read.append(backend().memory_stats()["segment.in_use_bytes"])
    return read[-1]


def await_bytes(wanted: int) -> None:
    """Wait until `wanted` bytes of the segment are in use. A worker may release some late."""
    deadline = time.monotonic() + 60
    while (used := backend().memory_stats()["segment.in_use_bytes"]) != wanted:
        assert time.monotonic() < deadline, (used, wanted)
        time.sleep(0.01)


def check_ddp_buckets(context: Context) -> None:
    """DDP takes its buckets from the group; they outlive DDP and stay readable."""
    before = settled_bytes()
    layer = torch.nn.Linear(100, 100)
    model = DistributedDataParallel(layer, gradient_as_bucket_view=True)
    for _ in range(3):
        model(torch.ones(4, 100)).sum().backward()
    await_bytes(before + 4 * (100 * 100 + 100))
    del model
    gradient = layer.weight.grad
    assert gradient is not None and torch.isfinite(gradient).all()


def check_complex_ddp(context: Context) -> None:
    """A bucket of complex gradients comes from the group too, and is reduced like any other."""
    used = backend().memory_stats()["segment.in_use_bytes"]
    same = torch.Generator().manual_seed(context.seed)
    weight = torch.randn(32, 8, dtype=torch.complex64, generator=same)
    model = DistributedDataParallel(ComplexLayer(weight))
    assert backend().memory_stats()["segment.in_use_bytes"] > used
    x = torch.randn(4, 32, generator=context.generator)
    for _ in range(3):
        model.zero_grad()
        model(x).sum().backward()
    alone = ComplexLayer(weight)
    alone(x).sum().backward()
    gradient = alone.weight.grad
    assert gradient is not None
    dist.all_reduce(gradient, dist.ReduceOp.AVG)
    torch.testing.assert_close(model.module.weight.grad, gradient)


class ComplexLayer(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def check_complex_memory(context: Context) -> None:
    device = torch.device("cpu")
    for dtype in (torch.complex64, torch.complex128):
        tensor = backend().allocate_tensor(5, dtype=dtype, device=device)
        assert tensor.shape == (5,) and tensor.dtype == dtype


def check_hook_that_resizes(context: Context) -> None:
    """A comm hook may enlarge its bucket, which keeps its values and stays in the segment."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 5)
    model = DistributedDataParallel(layer)

    def reduce_resized(bucket: Any) -> Any:
        buffer = bucket.buffer()
        count = buffer.numel()
        before = buffer.clone()
        buffer.resize_(count + 3)
        assert in_segment(buffer) and torch.equal(buffer[:count], before)
        buffer.resize_(count)
        work = dist.all_reduce(buffer.div_(context.size), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, lambda _state, bucket: reduce_resized(bucket))
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 5), float(context.rank + 1))).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, torch.full((5, 5), (context.size + 1) / 2))


def check_staging_is_bounded(context: Context) -> None:
    dist.all_reduce(torch.ones(5_000_000))
    stats = backend().memory_stats()
    staged = stats["staging.reserved_bytes"] + stats["slots.bytes"]
    assert 0 < staged <= stats["staging.budget_bytes"]
    assert stats["staging.overflow_bytes"] == 0
    assert stats["staging.abandoned_bytes"] == 0


def check_state(context: Context) -> None:
    group = backend()
    assert (group.rank(), group.size(), group.name()) == (context.rank, context.size, "hbm")
    assert isinstance(group.options, hbmcomm.Options)
    first = group._get_sequence_number_for_group()
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    assert group._get_sequence_number_for_group() == first + 5
    assert re.search("SUCCESS", str(group.get_error()))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(
    "check",
    [
        check_profiler_ranges,
        check_memory_from_the_group,
        check_complex_memory,
        check_staging_is_bounded,
        check_state,
    ],
)
def test_process_group(pool: Pool, check: Callable[[Context], None]) -> None:
    pool.run(check)


@pytest.mark.ranks(2)
def test_a_hook_may_resize_its_bucket(pool: Pool) -> None:
    pool.run(with_environment, check_hook_that_resizes, "DDP_DISABLE_COMM_MEM", "0")


@pytest.mark.ranks(2)
def test_profiler_ranges_have_shapes(pool: Pool) -> None:
    pool.run(check_profiler_shapes)


@pytest.mark.ranks(2)
def test_ddp_takes_its_buckets_from_the_group(pool: Pool) -> None:
    pool.run(with_environment, check_ddp_buckets, "DDP_DISABLE_COMM_MEM", "0")


@pytest.mark.ranks(2)
def test_ddp_takes_complex_parameters(pool: Pool) -> None:
    pool.run(with_environment, check_complex_ddp, "DDP_DISABLE_COMM_MEM", "0")


def with_environment(
    context: Context, check: Callable[[Context], None], name: str, value: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        check(context)


def check_error_state(context: Context) -> str:
    if context.rank == 0:
        with pytest.raises(dist.DistBackendError, match="missing ranks: 1"):
            dist.all_reduce(torch.ones(3))
        return str(backend().get_error())
    return ""


@pytest.mark.ranks(2)
def test_error_state(impatient_pool: Pool) -> None:
    assert "TIMEOUT" in impatient_pool.run(check_error_state)[0]
