"""Callbacks of futures: the operations that they may wait for, and their threads."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from torch._C._distributed_c10d import FileStore, _DistributedBackendOptions

pytestmark = beyond_gloo


def check_waits_for_another(context: Context) -> None:
    """A callback of the first operation waits for the second operation, in flight or complete."""
    first, second = torch.ones(1_000_000), torch.ones(1_000_000)
    first_work = dist.all_reduce(first, async_op=True)
    later = dist.all_reduce(second, async_op=True).get_future()
    first_work.get_future().then(lambda _: later.wait()).wait()
    assert second[0] == context.size


def check_callers_lock(context: Context) -> None:
    """Check that a thread that holds a lock never has to run a callback that takes this lock."""
    lock = threading.Lock()

    def locked(future: Any) -> Any:
        with lock:
            return future.value()

    for _ in range(200):
        work = dist.all_reduce(torch.ones(10), async_op=True)
        done = work.get_future().then(locked)
        with lock:
            other = dist.all_reduce(torch.ones(5), async_op=True)
            other.is_completed()
        other.wait()
        done.wait()


def check_many_futures(context: Context) -> None:
    tensors = [torch.full((100_000,), float(i)) for i in range(50)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    for i, future in enumerate(futures):
        assert future.wait()[0][0] == i * context.size


def check_last_reference_is_pythons(context: Context) -> None:
    """Release a group that Python alone owns, before one of its callbacks has run.

    The callback needs the GIL, which the releasing thread holds at first.
    """
    options = _DistributedBackendOptions()
    options.store = FileStore(str(context.folder / f"alone{context.seed}"), context.size)
    options.group_rank, options.group_size = context.rank, context.size
    options.timeout = timedelta(seconds=60)
    options.global_ranks_in_group = list(range(context.size))
    called = threading.Event()
    group: Any = dist.Backend._plugins["HBM"].creator_fn(options, None)
    if context.rank == 0:
        future = group.allreduce(torch.ones(1_000_000)).get_future()
        future.add_done_callback(lambda _: called.set())
        del future, group
        assert called.wait(60)
    dist.barrier()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("check", [check_waits_for_another, check_callers_lock, check_many_futures])
def test_callbacks(pool: Pool, check: Any) -> None:
    pool.run(check)


@pytest.mark.ranks(2, 4)
def test_last_reference_to_a_group(pool: Pool) -> None:
    pool.run(check_last_reference_is_pythons, limit=25)
