"""Callbacks of futures: what they may wait for, and where they run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo

pytestmark = beyond_gloo


def check_waits_for_another(context: Context) -> None:
    """A callback of the first operation waits for the second, which was issued before it ran."""
    first, second = torch.ones(1_000_000), torch.ones(1_000_000)
    first_work = dist.all_reduce(first, async_op=True)
    later = dist.all_reduce(second, async_op=True).get_future()
    first_work.get_future().then(lambda _: later.wait()).wait()
    assert second[0] == context.size


def check_callers_lock(context: Context) -> None:
    """A caller that holds a lock which a callback takes is never made to run that callback."""
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


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("check", [check_waits_for_another, check_callers_lock, check_many_futures])
def test_callbacks(pool: Pool, check: Any) -> None:
    pool.run(check)
