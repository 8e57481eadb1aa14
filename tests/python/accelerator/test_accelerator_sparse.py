"""Sparse all_reduce of accelerator tensors, against Gloo on the CPU."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, RankFailure, accelerator, beyond_gloo
from harness.data import assert_same
from harness.pool import DIED
from harness.reference import reduce_op
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = [beyond_gloo, pytest.mark.ranks(2, 4)]

ROWS = 400
Dense = tuple[int, ...]


def device_backend(context: Context) -> Any:
    """Return the backend. Tests call it: torch.distributed has no sparse sums for this device."""
    return _get_default_group()._get_backend(torch.device(context.device))


def asynchronous() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return options


def random_sparse(
    context: Context, elements: int, dense: Dense = (), dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a sparse CPU tensor of shape [ROWS, 30, *dense]. Some indices occur repeatedly.

    The values are small integers, so that sums are exact in any order.
    """
    indices = torch.stack(
        [torch.randint(0, size, (elements,), generator=context.generator) for size in (ROWS, 30)]
    )
    indices[:, elements // 2 : elements // 2 + 3] = indices[:, :1]
    values = torch.randint(-9, 9, (elements, *dense), generator=context.generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (ROWS, 30, *dense), check_invariants=True)


def on_device(context: Context, sparse: torch.Tensor) -> torch.Tensor:
    return copied_to(sparse, context.device)


def copied_to(sparse: torch.Tensor, device: str) -> torch.Tensor:
    """Copy a sparse tensor to `device`. The copy's indices are not contiguous."""
    indices = sparse._indices().t().contiguous().to(device).t()
    values = sparse._values().to(device)
    coalesced = sparse.is_coalesced() or None
    return torch.sparse_coo_tensor(
        indices, values, sparse.shape, is_coalesced=coalesced, check_invariants=False
    )


def assert_same_sparse(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    expected = expected.coalesce()
    assert found.is_coalesced(), what
    assert_same(found.indices().cpu(), expected.indices(), f"indices, {what}")
    assert_same(found.values().cpu(), expected.values(), f"values, {what}")


def reduced_by_gloo(context: Context, sparse: torch.Tensor) -> torch.Tensor:
    expected = sparse.clone()
    dist.all_reduce(expected, group=context.gloo)
    return expected


def empty_on_the_last(context: Context) -> torch.Tensor:
    last = context.rank == context.size - 1
    return random_sparse(context, 0 if last else 20)


CASES: dict[str, Callable[[Context], torch.Tensor]] = {
    "plain": lambda context: random_sparse(context, 50 + context.rank),
    "rows": lambda context: random_sparse(context, 40, (7, 2)),
    "coalesced": lambda context: random_sparse(context, 30).coalesce(),
    "empty": lambda context: random_sparse(context, 0),
    "empty on one": empty_on_the_last,
    "in the segment": lambda context: random_sparse(context, 9000 + context.rank, (3,)),
    "float64": lambda context: random_sparse(context, 50, dtype=torch.float64),
    "int64": lambda context: random_sparse(context, 50, (2,), dtype=torch.int64),
}


def check_all_reduce(context: Context) -> None:
    backend = device_backend(context)
    for name, make in CASES.items():
        for options in (dist.AllreduceOptions(), asynchronous()):
            data = make(context)
            tensor = on_device(context, data)
            backend.allreduce([tensor], options).wait()
            assert_same_sparse(tensor, reduced_by_gloo(context, data), name)


def test_all_reduce(delayed_pool: Pool) -> None:
    delayed_pool.run(check_all_reduce)


def check_queued(context: Context) -> None:
    """Check that an operation sees earlier queued work, and later queued work sees its result.

    The host never waits for the device.
    """
    delayed = accelerator.load()
    backend = device_backend(context)
    data = random_sparse(context, 3000)
    expected = reduced_by_gloo(context, data)
    for _ in range(2):
        expected = reduced_by_gloo(context, expected)
    tensor = on_device(context, data)
    tensor._values().zero_()
    values = data._values().pin_memory()
    delayed.synchronize()
    before = delayed.synchronizations()
    tensor._values().copy_(values, non_blocking=True)
    works = [backend.allreduce([tensor], asynchronous()) for _ in range(3)]
    for work in works:
        work.wait()
    seen = tensor._values().clone().mul_(2.0)
    assert delayed.synchronizations() == before, "the host waited for the device"
    assert torch.equal(seen.cpu(), 2 * expected.coalesce().values())
    assert_same_sparse(tensor, expected)


def test_queued_before_and_after(delayed_pool: Pool) -> None:
    delayed_pool.run(check_queued)


def check_issue_does_not_block(context: Context) -> None:
    delayed = accelerator.load()
    data = random_sparse(context, 100)
    tensor = on_device(context, data)
    delayed.hold()
    work = device_backend(context).allreduce([tensor], asynchronous())
    assert not work.is_completed()
    delayed.release()
    work.wait()
    assert_same_sparse(tensor, reduced_by_gloo(context, data))


def test_issue_does_not_block(delayed_pool: Pool) -> None:
    delayed_pool.run(check_issue_does_not_block)


def check_memory(context: Context) -> None:
    """Drop each result while a stream still reads it, then issue another operation.

    The reader is the issuing stream, or another stream that called wait(). The second operation's
    result must not reuse the memory of the first.
    """
    delayed = accelerator.load()
    backend = device_backend(context)
    issuing, other = torch.accelerator.current_stream(), torch.Stream(device=context.device)
    saved = []
    for index in range(20):
        data = random_sparse(context, 300)
        tensor = on_device(context, data)
        work = backend.allreduce([tensor], asynchronous())
        reader, writer = (other, issuing) if index % 2 else (issuing, other)
        with reader:
            work.wait()
            delayed.hold()
            saved.append((reduced_by_gloo(context, data), tensor._values().clone()))
        del tensor, work
        with writer:
            backend.allreduce([on_device(context, -data)]).wait()  # of the same size
        with reader:
            delayed.release()
    torch.accelerator.synchronize()
    for expected, seen in saved:
        assert torch.equal(seen.cpu(), expected.coalesce().values())
    gc.collect()
    counts = delayed.pinned_counts()
    assert counts["freed_in_copy"] == 0
    assert counts["reused_in_copy"] == 0


def test_memory_in_use(delayed_pool: Pool) -> None:
    delayed_pool.run(check_memory)


def check_polled(context: Context) -> None:
    """Use a result on the issuing stream after is_completed() alone, and drop it.

    Its memory must not be reused before the stream has read it.
    """
    delayed = accelerator.load()
    backend = device_backend(context)
    data = random_sparse(context, 300)
    expected = reduced_by_gloo(context, data).coalesce().values()
    tensor = on_device(context, data)
    work = backend.allreduce([tensor], asynchronous())
    while not work.is_completed():
        time.sleep(0.001)
    delayed.hold()
    seen = tensor._values().clone()
    del tensor, work
    with torch.Stream(device=context.device):
        backend.allreduce([on_device(context, -data)]).wait()  # of the same size
    delayed.release()
    assert torch.equal(seen.cpu(), expected)


def test_result_that_is_polled_for(delayed_pool: Pool) -> None:
    delayed_pool.run(check_polled)


def check_future(context: Context) -> None:
    data = random_sparse(context, 300)
    work = device_backend(context).allreduce([on_device(context, data)], asynchronous())
    doubled = work.get_future().then(lambda future: future.value()[0]._values().clone().mul_(2.0))
    expected = reduced_by_gloo(context, data).coalesce().values()
    assert torch.equal(doubled.wait().cpu(), 2 * expected)


def test_future(delayed_pool: Pool) -> None:
    delayed_pool.run(check_future)


def check_refused(context: Context) -> None:
    """Check that refused calls send nothing, so that the group still works."""
    delayed = accelerator.load()
    backend = device_backend(context)
    dist.all_reduce(torch.ones(4, device=context.device))  # from now on the group works on late:0
    data = random_sparse(context, 20)
    tensor = on_device(context, data)
    delayed.set_device(1)
    elsewhere = copied_to(data, "late:1")
    delayed.set_device(0)
    product = dist.AllreduceOptions()
    product.reduceOp = reduce_op("product")
    registered = r"(?s)'c10d::allreduce_' .* only available for .*SparseCPU, SparseCUDA"
    with pytest.raises(NotImplementedError, match=registered):
        dist.all_reduce(tensor)
    with pytest.raises(ValueError, match="with PRODUCT: only SUM is supported"):
        backend.allreduce([tensor], product)
    with pytest.raises(ValueError, match="broadcast is not dense; sparse tensors are supported by"):
        backend.broadcast([tensor])
    with pytest.raises(ValueError, match=r"is on late:1, and group .* works on late:0"):
        backend.allreduce([elsewhere])
    if hasattr(torch.Stream, "is_capturing"):
        delayed.set_capturing(True)
        with pytest.raises(ValueError, match="the current stream of late:0 records a graph"):
            backend.allreduce([tensor])
        delayed.set_capturing(False)
    backend.allreduce([tensor]).wait()
    assert_same_sparse(tensor, reduced_by_gloo(context, data))


def test_refused(delayed_pool: Pool) -> None:
    delayed_pool.run(check_refused)


def check_no_pinned_memory(context: Context) -> None:
    """Rank 0 has no pinned memory when the operation begins, so the operation fails everywhere."""
    tensor = on_device(context, random_sparse(context, 20))
    dist.barrier()
    if context.rank == 0:
        accelerator.load().fail_pinned(True)
    with pytest.raises(
        torch.OutOfMemoryError if context.rank == 0 else dist.DistBackendError,
        match="no memory on the host, pinned for late:0",
    ):
        device_backend(context).allreduce([tensor]).wait()


def test_out_of_pinned_memory(own_delayed_pool: Pool) -> None:
    own_delayed_pool.run(check_no_pinned_memory)


def check_death(context: Context) -> None:
    delayed = accelerator.load()
    backend = device_backend(context)
    data = random_sparse(context, 300)
    backend.allreduce([on_device(context, data)]).wait()
    if context.rank == 1:
        works = [backend.allreduce([on_device(context, data)], asynchronous()) for _ in range(3)]
        assert works
        time.sleep(context.own_random.random() * 0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        for _ in range(1000):
            backend.allreduce([on_device(context, data)]).wait()
    delayed.synchronize()
    assert delayed.pinned_counts()["freed_in_copy"] == 0


@pytest.mark.ranks(2)
def test_rank_that_dies(own_delayed_pool: Pool) -> None:
    with pytest.raises(RankFailure) as caught:
        own_delayed_pool.run(check_death)
    assert caught.value.kinds == {1: DIED}, str(caught.value)
