"""Windows: one-sided puts and signals between ranks that share memory (PyTorch 2.14 and later)."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from functools import partial
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same, gathered, random_bits
from harness.nodes import on_nodes
from harness.segments import in_use
from harness.windows import (
    COUNT,
    LARGE,
    MARKS,
    check_signals,
    neighbours,
    new_window,
    refusal,
    supports_window,
    zeros,
)
from torch.distributed import distributed_c10d

from torch_hbmcomm import Options, memory

pytestmark = MARKS


def finish(work: Any, async_op: bool) -> None:
    if async_op:
        work.wait()


# Puts and signals.


def check_ring(context: Context, dtype: torch.dtype) -> None:
    after, before = neighbours(context)
    data = random_bits(context, COUNT, dtype)
    everyone = gathered(context, data)
    for async_op in (False, True):
        for at_once in (False, True):
            buffer = zeros(context.size, COUNT, dtype=dtype)
            window = new_window(buffer if at_once else None)
            if not at_once:
                window.tensor_register(buffer)
            for turn in range(4):
                what = f"{dtype}, turn {turn}, async_op={async_op}"
                finish(window.put(data, after, context.rank * COUNT, async_op), async_op)
                finish(window.signal(after, async_op), async_op)
                finish(window.wait_signal(before, async_op), async_op)
                for rank, row in enumerate(buffer):
                    expected = everyone[before] if rank == before else torch.zeros_like(data)
                    assert_same(row, expected, what)
                buffer.zero_()
                window.signal(before, False)  # the memory is free again
                window.wait_signal(after, False)
            window.tensor_deregister()


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_puts_of_a_ring(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(check_ring, dtype)


def check_order(context: Context) -> None:
    """Nobody waits for the puts: the signal behind them says that their data are there."""
    after, before = neighbours(context)
    buffer = zeros(LARGE)
    window = new_window(buffer)
    for turn in range(1, 4):
        works = [
            window.put(torch.full((LARGE,), -1.0), after, 0, True),
            window.put(torch.full((LARGE,), float(turn)), after, 0, True),
            window.signal(after, True),
        ]
        window.wait_signal(before, False)
        assert (buffer == turn).all()
        window.signal(before, False)
        window.wait_signal(after, False)
        assert all(work.is_completed() for work in works)
    window.put(torch.full((LARGE,), 9.0), after, 0, True)
    window.tensor_deregister()  # waits for the put
    assert (buffer == 9).all()


@pytest.mark.ranks(1, 2, 4)
def test_a_signal_follows_the_puts_before_it(pool: Pool) -> None:
    pool.run(check_order)


def check_places(context: Context) -> None:
    """Each rank registers a tensor of its own size and type."""

    def shape_and_type(rank: int) -> tuple[tuple[int, ...], torch.dtype]:
        return (rank + 1, 3), torch.float64 if rank % 2 else torch.int32

    shape, dtype = shape_and_type(context.rank)
    own = zeros(*shape, dtype=dtype)
    window = new_window()
    window.tensor_register(own, owning=False)
    for peer in range(context.size):
        shape, dtype = shape_and_type(peer)
        if context.rank == (peer + 1) % context.size:
            strided = torch.arange(2 * (peer + 1) * 3).to(dtype)[::2]
            window.put(strided, peer, 0, False)
            put = partial(window.put, zeros(1, dtype=dtype), peer, 10**6, False)
            assert "exceeds the window size" in refusal(put)
            window.signal(peer, False)
        view = window.map_remote_tensor(peer)
        assert (view.shape, view.dtype) == (shape, dtype)
    window.wait_signal((context.rank + 1) % context.size, False)
    assert own.reshape(-1).tolist() == [2 * i for i in range(own.numel())]
    check_signals(context, window)
    window.tensor_deregister()


@pytest.mark.ranks(1, 2, 3)
def test_ranks_register_different_tensors(pool: Pool) -> None:
    pool.run(check_places)


def check_mapped(context: Context) -> None:
    buffer = zeros(context.size)
    window = new_window(buffer)
    views = [window.map_remote_tensor(rank) for rank in range(context.size)]
    assert views[context.rank].data_ptr() == buffer.data_ptr()
    for view in views:
        view[context.rank] = context.rank + 1.0
    check_signals(context, window)
    for rank, view in enumerate(views):
        assert view.tolist() == [each + 1.0 for each in range(context.size)]
        assert window.get_attr(rank).access_type.name == "UNIFIED"
    check_signals(context, window)
    window.tensor_deregister()


@pytest.mark.ranks(1, 2, 4)
def test_memory_of_other_ranks_is_mapped(pool: Pool) -> None:
    pool.run(check_mapped)


def check_two_windows(context: Context) -> None:
    """Data and signals of one window do not show in another."""
    after, before = neighbours(context)
    buffers = [zeros(COUNT), zeros(COUNT)]
    first, second = (new_window(buffer) for buffer in buffers)
    pending = first.wait_signal(before, True)
    second.put(torch.full((COUNT,), 2.0), after, 0, True)
    second.signal(after, True)
    second.wait_signal(before, False)
    assert (buffers[1] == 2).all()
    assert not buffers[0].any()
    assert not pending.is_completed()
    dist.barrier()  # nobody has signalled in the first window before
    first.put(torch.ones(COUNT), after, 0, True)
    first.signal(after, True)
    pending.wait()
    assert (buffers[0] == 1).all()
    first.tensor_deregister()
    assert "not registered" in refusal(partial(first.signal, after, False))
    check_signals(context, second)
    second.tensor_deregister()


@pytest.mark.ranks(1, 2, 4)
def test_two_windows_of_a_group(pool: Pool) -> None:
    pool.run(check_two_windows)


def batch() -> Any:
    return distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True)


def check_batch(context: Context) -> None:
    """Only asynchronous operations are possible in a batch, and they begin at its end."""
    after, before = neighbours(context)
    buffer = zeros(COUNT)
    window, another = new_window(buffer), new_window()
    calls: dict[str, Callable[[], Any]] = {
        "put": lambda: window.put(torch.ones(COUNT), after, 0, False),
        "signal": lambda: window.signal(after, False),
        "wait_signal": lambda: window.wait_signal(before, False),
        "tensor_deregister": window.tensor_deregister,
        "tensor_register": lambda: another.tensor_register(zeros(1)),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name} was called within a batch"), batch():
            window.put(torch.full((COUNT,), 9.0), after, 0, True)  # never begins
            call()
    dist.barrier()
    assert not buffer.any()
    dist.barrier()  # the next puts come after this rank's look
    with batch() as both:
        works = [
            window.put(torch.full((COUNT,), 3.0), after, 0, True),
            window.signal(after, True),
        ]
        assert not any(work.is_completed() for work in works)
    both.wait()
    window.wait_signal(before, False)
    assert (buffer == 3).all()
    window.tensor_deregister()


@pytest.mark.ranks(1, 2)
def test_a_batch_defers_puts_and_signals(pool: Pool) -> None:
    pool.run(check_batch)


def check_threads(context: Context) -> None:
    window = new_window(zeros(COUNT))
    waiting = [
        threading.Thread(target=window.wait_signal, args=(peer, False))
        for peer in range(context.size)
    ]
    for thread in waiting:
        thread.start()
    future = window.put(torch.ones(COUNT), context.rank, 0, True).get_future()
    for peer in range(context.size):
        window.signal(peer, True)
    for thread in waiting:
        thread.join()
    future.wait()
    assert window.map_remote_tensor(context.rank).sum() == COUNT
    window.tensor_deregister()


@pytest.mark.ranks(1, 2, 4)
def test_threads_share_a_window(pool: Pool) -> None:
    pool.run(check_threads)


# Mistakes: each has the call, and words of the error's message.

Mistake = Callable[[Context, Any, torch.Tensor], Any]
MISTAKES: dict[str, tuple[Mistake, str]] = {
    "put beyond the end": (lambda c, w, t: w.put(torch.ones(5), 0, 6, False), "exceeds .* 10"),
    "put before the begin": (lambda c, w, t: w.put(torch.ones(5), 0, -1, True), "offset -1"),
    "put of another type": (lambda c, w, t: w.put(torch.ones(5).int(), 0, 0, True), "Int.*Float"),
    "put to no rank": (lambda c, w, t: w.put(torch.ones(5), c.size, 0, True), "rank [1-9]"),
    "put of sparse data": (lambda c, w, t: w.put(torch.ones(5).to_sparse(), 0, 0, True), "dense"),
    "put on a device": (lambda c, w, t: w.put(torch.ones(5, device="meta"), 0, 0, True), "meta"),
    "put onto itself": (lambda c, w, t: w.put(t[1:4], c.rank, 2, True), "shares memory"),
    "put of a mapped part onto itself": (
        lambda c, w, t: w.put(w.map_remote_tensor(0)[:2], 0, 1, True),
        "shares memory",
    ),
    "signal to no rank": (lambda c, w, t: w.signal(-1, False), "rank -1"),
    "wait for no rank": (lambda c, w, t: w.wait_signal(c.size, False), "rank [1-9]"),
    "map no rank": (lambda c, w, t: w.map_remote_tensor(c.size), "rank [1-9]"),
    "attributes of no rank": (lambda c, w, t: w.get_attr(-2), "rank -2"),
    "register twice": (lambda c, w, t: w.tensor_register(t), "double registration"),
}


def check_mistakes(context: Context) -> None:
    buffer = zeros(10)
    window = new_window(buffer)
    for name, (call, words) in MISTAKES.items():
        message = refusal(partial(call, context, window, buffer))
        assert re.search(words, message), f"{name}: {message}"
    check_signals(context, window)
    assert not buffer.any()
    window.tensor_deregister()


@pytest.mark.ranks(1, 2)
def test_mistakes_are_refused(pool: Pool) -> None:
    pool.run(check_mistakes)


def check_unregistered(context: Context) -> None:
    window = new_window()
    buffer = zeros(4)
    calls: list[Callable[[], Any]] = [
        lambda: window.put(torch.ones(1), 0, 0, False),
        lambda: window.signal(0, False),
        lambda: window.wait_signal(0, True),
        lambda: window.map_remote_tensor(0),
        lambda: window.get_attr(0),
        lambda: window.tensor_deregister(),
    ]
    for _ in range(2):
        for call in calls:
            assert "not registered" in refusal(call)
        window.tensor_register(buffer)
        check_signals(context, window)
        window.tensor_deregister()


@pytest.mark.ranks(1, 2)
def test_a_window_needs_a_tensor(pool: Pool) -> None:
    pool.run(check_unregistered)


BAD_TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "ordinary": (lambda: torch.zeros(8), r"not in the segment .*memory\.empty\(shape, dtype"),
    "other policy": (lambda: memory.empty(8, policy="ddr"), "not in the segment"),
    "strided": (lambda: zeros(8)[::2], "not contiguous"),
    "on a device": (lambda: torch.zeros(8, device="meta"), "meta"),
    "of many dimensions": (lambda: memory.empty([1] * 65), "65 dimensions"),
}


def check_bad_tensor(context: Context, name: str, alone: bool) -> None:
    make, words = BAD_TENSORS[name]
    refuses = context.rank == context.size - 1 or not alone
    window = new_window()
    message = refusal(lambda: window.tensor_register(make() if refuses else zeros(8)))
    if not refuses:
        assert f"was refused by rank {context.size - 1} (pid" in message, message
    assert re.search(words, message), message
    window.tensor_register(zeros(8))
    check_signals(context, window)
    window.tensor_deregister()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", BAD_TENSORS)
@pytest.mark.parametrize("alone", [True, False])
def test_all_ranks_learn_of_a_refused_tensor(pool: Pool, name: str, alone: bool) -> None:
    pool.run(check_bad_tensor, name, alone)


def check_other_memory(context: Context) -> None:
    """The window keeps its memory when the program gives its tensor other memory."""
    after, before = neighbours(context)
    buffer = zeros(COUNT)
    window = new_window(buffer)
    buffer.data = torch.zeros(1)
    gc.collect()
    window.put(torch.ones(COUNT), after, 0, False)
    window.signal(after, False)
    window.wait_signal(before, False)
    assert window.map_remote_tensor(context.rank).tolist() == [1.0] * COUNT
    assert not buffer.any()
    window.tensor_deregister()


@pytest.mark.ranks(1, 2)
def test_a_registered_tensor_with_other_memory(pool: Pool) -> None:
    pool.run(check_other_memory)


def check_two_changes(context: Context) -> None:
    """Two threads of rank 0 change one window, while the other rank has not come yet."""
    window = new_window()
    for change in (lambda: window.tensor_register(zeros(4)), window.tensor_deregister):
        if context.rank == 0:
            outcomes: Queue[str] = Queue()

            def attempt(
                change: Callable[[], None] = change, outcomes: Queue[str] = outcomes
            ) -> None:
                try:
                    change()
                    outcomes.put("changed")
                except ValueError as error:
                    outcomes.put(str(error))

            threads = [threading.Thread(target=attempt, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            assert "another thread is registering or deregistering" in outcomes.get(timeout=60)
            dist.barrier(context.gloo)
            for thread in threads:
                thread.join()
            assert outcomes.get() == "changed"
        else:
            dist.barrier(context.gloo)
            change()
    assert "not registered" in refusal(window.tensor_deregister)


@pytest.mark.ranks(2)
def test_one_thread_changes_a_window(pool: Pool) -> None:
    pool.run(check_two_changes)


# The end of a window.


def check_release(context: Context) -> None:
    gc.collect()
    before = in_use()
    window = new_window(zeros(1 << 20))
    gc.collect()
    assert in_use() >= before + (4 << 20), "the window did not keep its tensor"
    window.tensor_deregister()
    gc.collect()
    assert in_use() <= before


@pytest.mark.ranks(1, 2)
def test_deregistering_releases_the_memory(pool: Pool) -> None:
    pool.run(check_release)


def check_dropped(context: Context) -> None:
    gc.collect()
    before = in_use()
    window = new_window(zeros(1 << 20))
    check_signals(context, window)
    del window
    gc.collect()
    assert in_use() >= before + (4 << 20), "other ranks may still write there"
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_dropped_window_keeps_its_tensor(fresh_pool: Pool) -> None:
    fresh_pool.run(check_dropped)


def check_pending_wait(context: Context) -> None:
    window = new_window(zeros(4))
    last = context.size - 1
    work = window.wait_signal(0, True) if context.rank == last else None
    message = refusal(window.tensor_deregister)
    assert "1 wait_signal() that has not ended" in message
    assert work or f"was refused by rank {last} (pid" in message
    if context.rank == 0:
        window.signal(last, False)
    if work:
        work.wait()
    window.tensor_deregister()


@pytest.mark.ranks(2, 3)
def test_a_window_with_a_pending_wait_stays(pool: Pool) -> None:
    pool.run(check_pending_wait)


# Groups without windows.


def check_nodes(context: Context, layout: str) -> None:
    assert not supports_window()
    message = refusal(new_window)
    apart = [rank for rank, node in enumerate(layout) if node != layout[context.rank]]
    for rank in apart:
        assert re.search(rf"\b{rank} \(pid \d+", message), message
    assert "on one node" in message
    own = dist.new_subgroups_by_enumeration([[0, 1], [2]])[0]
    assert supports_window(own)
    window = new_window(zeros(4), own)
    window.tensor_deregister()
    dist.barrier()


def test_ranks_of_several_nodes_are_refused() -> None:
    pool = Pool(3, bare=True)
    try:
        pool.run(on_nodes, "aab", check_nodes, "aab")
        assert not any(pool.close())
    finally:
        pool.kill()


def check_mpi(context: Context) -> None:
    group = dist.new_group(pg_options=Options(transport="mpi"))
    assert not supports_window(group)
    message = refusal(partial(new_window, None, group))
    assert 'its transport is "mpi"' in message
    assert "pid" not in message
    dist.barrier()


@pytest.mark.ranks(1, 2)
def test_a_group_over_mpi_alone_is_refused(fresh_pool: Pool) -> None:
    fresh_pool.run(check_mpi)
