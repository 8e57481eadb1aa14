"""Asynchronous operations: order of issue, waiting in any order, futures, threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import assert_reduced, gathered, random_numbers
from harness.events import await_rank, tell
from harness.reference import reduced

pytestmark = pytest.mark.conformance

SIZES = [1, 7, 1000, 20_000, 300_000]


def check_random_waits(context: Context) -> None:
    """Issue many reductions. Each rank waits for them in its own random order."""
    sizes = [context.shared_random.choice(SIZES) for _ in range(40)]
    data = [random_numbers(context, size, torch.float32) for size in sizes]
    expected = [reduced(gathered(context, tensor), "sum") for tensor in data]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in data]
    order = list(range(len(works)))
    context.own_random.shuffle(order)
    for index in order:
        work = works[index]
        assert work is not None
        assert work.wait()
        assert_reduced(data[index], expected[index], f"operation {index}")


def test_waits_in_random_order(pool: Pool) -> None:
    pool.run(check_random_waits)


def check_mixture(context: Context) -> None:
    """Run collectives of several kinds in flight on one group."""
    size, rank = context.size, context.rank
    works, checks = [], []
    for step in range(60):
        kind = context.shared_random.choice(["all_reduce", "broadcast", "all_gather", "barrier"])
        if kind == "all_reduce":
            total = torch.full((step * 50 + 1,), float(rank + step))
            works.append(dist.all_reduce(total, async_op=True))
            checks.append((total, float(size * step + size * (size - 1) / 2)))
        elif kind == "broadcast":
            root = step % size
            copy = torch.full((step + 1,), float(rank))
            works.append(dist.broadcast(copy, root, async_op=True))
            checks.append((copy, float(root)))
        elif kind == "all_gather":
            parts = [torch.empty(step + 1) for _ in range(size)]
            works.append(
                dist.all_gather(parts, torch.full((step + 1,), rank * 10.0), async_op=True)
            )
            checks += [(part, sender * 10.0) for sender, part in enumerate(parts)]
        else:
            works.append(dist.barrier(async_op=True))
        if context.own_random.random() < 0.1:
            time.sleep(0.005)
    for work in reversed(works):
        assert work is not None
        work.wait()
    for tensor, value in checks:
        assert (tensor == value).all(), (tensor, value)


@pytest.mark.every_size
def test_mixture_of_collectives_in_flight(pool: Pool) -> None:
    for _ in range(3):
        pool.run(check_mixture)


def check_sync_after_async(context: Context) -> None:
    """A synchronous operation may not overtake asynchronous ones issued before it."""
    for _ in range(20):
        data = torch.ones(200_000)
        work = dist.all_reduce(data, async_op=True)
        small = torch.ones(1)
        dist.all_reduce(small)
        assert small.item() == context.size
        assert work is not None
        work.wait()
        assert data[-1].item() == context.size


def test_sync_between_async(pool: Pool) -> None:
    pool.run(check_sync_after_async)


def check_same_tensor(context: Context) -> None:
    """Operations on one tensor, issued back to back, apply in the order of issue."""
    data = torch.ones(1000)
    works = [dist.all_reduce(data, async_op=True) for _ in range(4)]
    for work in works:
        assert work is not None
        work.wait()
    assert (data == float(context.size**4)).all()


@beyond_gloo
def test_chain_on_one_tensor(pool: Pool) -> None:
    pool.run(check_same_tensor)


def check_futures(context: Context) -> None:
    """Use results after their futures alone, without wait()."""
    data = [torch.ones(size) for size in SIZES * 5]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in data]
    halves = []
    for work in works:
        assert work is not None
        halves.append(work.get_future().then(lambda future: future.value()[0] / 2))
    for tensor, half in zip(data, torch.futures.wait_all(halves), strict=True):
        assert (half == context.size / 2).all() and half.shape == tensor.shape


def test_futures_without_wait(pool: Pool) -> None:
    pool.run(check_futures)


def check_results(context: Context) -> None:
    """result() and the future's value are the list of output tensors, not copies of them."""
    data = torch.ones(10)
    work = dist.all_reduce(data, async_op=True)
    assert work is not None
    work.wait()
    for outputs in (work.result(), work.get_future().value()):
        assert isinstance(outputs, list) and len(outputs) == 1
        assert outputs[0].data_ptr() == data.data_ptr()
    assert work.is_completed() and work.is_success()


def test_result_and_future_value(pool: Pool) -> None:
    pool.run(check_results)


def check_polling(context: Context) -> None:
    """is_completed() becomes true if the rank only polls, without wait()."""
    for size in SIZES:
        data = torch.ones(size)
        work = dist.all_reduce(data, async_op=True)
        assert work is not None
        deadline = time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < deadline, f"size {size} never completed"
            time.sleep(0.0005)
        assert (data == context.size).all()


def test_polling_completes(pool: Pool) -> None:
    pool.run(check_polling)


def check_dropped_works(context: Context) -> None:
    """Dropped works still run, and their tensors stay alive until then."""
    for _ in range(50):
        dist.all_reduce(torch.ones(5000), async_op=True)
    final = torch.ones(3)
    dist.all_reduce(final)
    assert final.tolist() == [context.size] * 3


def test_dropped_works(pool: Pool) -> None:
    pool.run(check_dropped_works)


def in_threads(bodies: list[Callable[[], None]]) -> None:
    """Run all bodies in parallel. Raises the first error."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def check_group_per_thread(context: Context) -> None:
    """Check that each thread can own a group; threads interleave differently on every rank."""
    groups = [dist.new_group() for _ in range(4)]

    def traffic(index: int, group: dist.ProcessGroup) -> None:
        pauses = [context.own_random.random() for _ in range(25)]
        for step, pause in enumerate(pauses):
            data = torch.full((1 + step * 400 * index,), float(context.rank * (index + 1)))
            work = dist.all_reduce(data, group=group, async_op=step % 2 == 0)
            if pause < 0.3:
                time.sleep(pause / 100)
            if work is not None:
                work.wait()
            expected = (index + 1) * context.size * (context.size - 1) / 2
            assert (data == expected).all(), (index, step)

    in_threads([partial(traffic, index, group) for index, group in enumerate(groups)])
    for group in groups:
        dist.destroy_process_group(group)


def test_group_per_thread(pool: Pool) -> None:
    pool.run(check_group_per_thread, limit=100)


def check_waits_in_threads(context: Context) -> None:
    """Check that one thread can issue and others wait; several threads may wait for one work."""
    data = [torch.ones(2000 * index + 1) for index in range(16)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in data]

    def wait_for(index: int) -> None:
        work = works[index % len(works)]
        assert work is not None
        work.wait()
        assert (data[index % len(works)] == context.size).all()

    in_threads([partial(wait_for, index) for index in range(2 * len(works))])


def test_waiting_in_other_threads(pool: Pool) -> None:
    pool.run(check_waits_in_threads)


def check_gil_is_free(context: Context) -> None:
    """While a rank waits for a late peer, the rank's other Python threads continue. The peer comes
    only after these threads have run."""
    stop = threading.Event()

    def tick() -> None:
        ticks = 0
        while not stop.wait(0.005):
            ticks += 1
            if ticks == 20:  # while the main thread waits, since the late rank has not come
                tell(context, "ticked")

    late = context.size - 1
    if context.rank == late:
        for rank in range(late):
            await_rank(context, "ticked", rank)
        dist.all_reduce(torch.ones(10))
        return
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    dist.all_reduce(torch.ones(10))
    stop.set()
    ticker.join()


@pytest.mark.ranks(2, 4)
def test_waiting_frees_the_interpreter(pool: Pool) -> None:
    pool.run(check_gil_is_free)


def check_profiler(context: Context) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(10))
        work = dist.all_reduce(torch.ones(10), async_op=True)
        assert work is not None
        work.wait()
    found = [event.key for event in profile.key_averages() if "all_reduce" in event.key]
    assert found, "no all_reduce range in the profile"


@pytest.mark.ranks(2)
def test_profiler_range(pool: Pool) -> None:
    pool.run(check_profiler)
