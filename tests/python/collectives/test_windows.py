"""Windows: one-sided puts and signals between ranks that share memory (PyTorch 2.14 and later)."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, RankFailure, beyond_gloo
from harness.data import assert_same, gathered, random_bits
from harness.members import Members, all_call, assert_joined
from harness.nodes import on_nodes
from harness.pool import DIED
from harness.segments import in_use
from torch.distributed.distributed_c10d import _get_default_group

from torch_hbmcomm import memory

new_window: Any = getattr(dist, "_new_window", None)
supports_window: Any = getattr(dist, "_supports_window", None)
wait_options: Any = getattr(torch._C._distributed_c10d, "WaitSignalOptions", None)

pytestmark = [
    beyond_gloo,
    pytest.mark.skipif(new_window is None, reason="PyTorch 2.14 brought windows"),
]

COUNT = 1000
LARGE = 10 << 20  # elements of float32: more than a poll of an operation copies


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros that other ranks can write."""
    return memory.empty(shape, dtype).zero_()


def finish(work: Any, async_op: bool) -> None:
    if async_op:
        work.wait()


def refusal(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def check_signals(context: Context, window: Any) -> None:
    """Check that the window works on all ranks."""
    for peer in range(context.size):
        window.signal(peer, False)
    for peer in range(context.size):
        window.wait_signal(peer, False)


# Puts and signals.


def check_ring(context: Context, dtype: torch.dtype) -> None:
    after, before = (context.rank + 1) % context.size, (context.rank - 1) % context.size
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
    after, before = (context.rank + 1) % context.size, (context.rank - 1) % context.size
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
    del window
    gc.collect()
    assert len(views[0].tolist()) == context.size  # the memory stays mapped


@pytest.mark.ranks(1, 2, 4)
def test_memory_of_other_ranks_is_mapped(pool: Pool) -> None:
    pool.run(check_mapped)


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


# The end of a window.


def check_release(context: Context) -> None:
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


# Failures.


def check_timeout(context: Context) -> None:
    buffer = zeros(4)
    window = new_window(buffer)
    options = wait_options()
    options.timeout = timedelta(milliseconds=50)
    if context.rank == 0:
        work = window.wait_signal(1, True, options)
        for wait in (work.wait, lambda: window.wait_signal(1, False, options)):
            message = refusal(wait, dist.DistBackendError)
            assert re.search(r"window wait_signal from rank 1 .* timed out after 50 ms", message)
            assert re.search(r"missing ranks: 1 \(pid", message), message
    dist.barrier()
    check_signals(context, window)  # the group goes on
    window.tensor_deregister()


@pytest.mark.ranks(2)
def test_a_signal_that_does_not_come(pool: Pool) -> None:
    pool.run(check_timeout)


def check_death(context: Context, call: str) -> None:
    last = context.size - 1
    buffer = zeros(4)
    window = new_window(buffer)
    check_signals(context, window)
    if context.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    first = refusal(lambda: window.wait_signal(last, False), dist.DistBackendError)
    assert re.search(rf"rank {last} \(pid \d+ on .*\) has died", first), first
    refused: dict[str, Callable[[], Any]] = {
        "put": lambda: window.put(torch.ones(4), 0, 0, False),
        "signal": lambda: window.signal(0, True),
        "deregister": window.tensor_deregister,
    }
    assert "has died" in refusal(refused[call], dist.DistBackendError)
    assert not buffer.any()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("call", ["put", "signal", "deregister"])
def test_a_rank_dies(fresh_pool: Pool, ranks: int, call: str) -> None:
    with pytest.raises(RankFailure) as failure:
        fresh_pool.run(check_death, call)
    assert failure.value.kinds == {ranks - 1: DIED}, failure.value


def require_refusals(window: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: window.put(torch.ones(4), 0, 0, False),
        lambda: window.wait_signal(0, True),
        window.tensor_deregister,
    ]
    for call in calls:
        assert "refused because the group failed earlier" in refusal(call, dist.DistBackendError)


def check_end_of_group(context: Context, how: str) -> None:
    buffer = zeros(4)
    window = new_window(buffer)
    dist.barrier(context.gloo)
    if how == "abort":
        _get_default_group().abort()
    else:
        dist.destroy_process_group()
    require_refusals(window)
    assert not buffer.any()
    del window  # it may have the last reference to the group
    gc.collect()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_no_puts_after_the_end_of_the_group(fresh_pool: Pool, how: str) -> None:
    fresh_pool.run(check_end_of_group, how)


kept: list[Any] = []  # the windows of a member of the next test


def make_window() -> str:
    kept.append(new_window(zeros(4)))
    return "made"


def use_windows() -> tuple[str, float]:
    """Return the error of the first window, and the data in this rank's part of the last."""
    old, new = kept
    rank, size = dist.get_rank(), dist.get_world_size()
    error = refusal(lambda: old.put(torch.ones(4), 0, 0, False), dist.DistBackendError)
    new.put(torch.full((4,), rank + 1.0), (rank + 1) % size, 0, False)
    new.signal((rank + 1) % size, False)
    new.wait_signal((rank - 1) % size, False)
    return error, float(new.map_remote_tensor(rank).sum())


def test_a_window_is_of_the_ranks_that_made_it() -> None:
    with Members("in place") as members:
        ranks = members.start("aa")
        for uuid in (1, 2):
            assert_joined(ranks, uuid)
            assert all_call(ranks, make_window) == ["made"] * 2
        for rank, (error, total) in enumerate(all_call(ranks, use_windows)):
            assert "before reconfigure()" in error
            assert total == 4 * (2 - rank)


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
