"""Windows: calls that differ between ranks, lost puts, deaths, Ctrl-C, and the end of the group."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, RankFailure
from harness.members import Members, all_call, assert_joined
from harness.pool import DIED
from harness.segments import in_use
from harness.windows import LARGE, MARKS, check_signals, new_window, refusal, timeout, zeros
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = MARKS


def check_differing_calls(context: Context) -> None:
    """Rank 0 makes another call than the other ranks. All ranks get an error, and continue."""
    first, second, third = windows = [new_window() for _ in range(3)]
    leads = context.rank == 0

    def differ(calls: list[tuple[str, Any]]) -> None:
        name, window = calls[0] if leads else calls[1]
        tensors = [zeros(4)] if name == "tensor_register" else []
        call = partial(getattr(window, name), *tensors)
        message = refusal(call, dist.DistBackendError)
        found = re.search(
            r"rank 0 \(pid .*\) called (\w+) of window (\d+), "
            r"and rank 1 \(pid .*\) called (\w+) of window (\d+) ",
            message,
        )
        assert found, message
        assert [found[1], found[3]] == [name for name, _ in calls], message
        places = [windows.index(window) for _, window in calls]
        assert int(found[4]) - int(found[2]) == places[1] - places[0], message

    differ([("tensor_register", first), ("tensor_register", second)])
    for window in (first, second):
        window.tensor_register(zeros(4))
    differ([("tensor_deregister", first), ("tensor_deregister", second)])
    differ([("tensor_deregister", first), ("tensor_register", third)])
    differ([("tensor_register", third), ("tensor_deregister", second)])
    for window in (second, first):
        check_signals(context, window)
        window.tensor_deregister()


@pytest.mark.ranks(2, 3)
def test_ranks_that_call_different_windows(pool: Pool) -> None:
    pool.run(check_differing_calls)


def lose_put(window: Any, to: int) -> None:
    """Let a put of 4 elements time out behind a large one. The large put may end before that."""
    for _ in range(100):
        window.put(torch.zeros(LARGE), to, 0, True)
        try:
            window.put(torch.ones(4), to, 0, False, timeout("Put", 0))
        except dist.DistBackendError:
            return
    pytest.fail("no put timed out")


def check_lost_put(context: Context) -> None:
    """No signal says that the data of a lost put are there."""
    buffer = zeros(LARGE)
    window = new_window(buffer)
    last = context.size - 1
    if context.rank == 0:
        lose_put(window, last)
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("put of 1 float32", lambda: window.put(torch.ones(1), last, 9, False)),
            ("signal", window.signal(last, True).wait),
            ("signal", lambda: window.signal(last, False)),
        ]
        for name, call in calls:
            message = refusal(call, dist.DistBackendError)
            assert f"window {name} to rank {last} on rank 0" in message
            assert f"window put of 4 float32 to rank {last} on rank 0" in message
    dist.barrier()
    if context.rank == 0:  # another target
        window.signal(0, False)
        window.wait_signal(0, False)
    if context.rank == last:
        late = partial(window.wait_signal, 0, False, timeout("WaitSignal", 50))
        assert "timed out after 50 ms" in refusal(late, dist.DistBackendError)
    window.tensor_deregister()
    window.tensor_register(buffer)
    check_signals(context, window)
    window.tensor_deregister()


@pytest.mark.ranks(2, 3)
def test_no_signal_follows_a_lost_put(pool: Pool) -> None:
    pool.run(check_lost_put)


def check_interrupt(context: Context) -> None:
    """Ctrl-C ends the wait for a signal. The wait's operation and the group's messages continue."""
    window = new_window(zeros(4))
    if context.rank == 0:
        interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            interrupt.start()
            window.wait_signal(1, False)
            pytest.fail("the wait ended")
    dist.barrier(context.gloo)
    if context.rank == 1:
        for _ in range(2):  # a signal for the interrupted wait, if it had begun, and another
            window.signal(0, False)
        dist.send(torch.ones(3), 0)
    dist.barrier(context.gloo)
    if context.rank == 0:
        got = torch.zeros(3)
        dist.recv(got, 1)
        assert got.tolist() == [1.0] * 3
        window.wait_signal(1, False)
    window.tensor_deregister()


@pytest.mark.ranks(2)
def test_an_interrupt_ends_a_wait_alone(pool: Pool) -> None:
    pool.run(check_interrupt)


def check_abort_of_waits(context: Context) -> None:
    window = new_window(zeros(4))
    peer = (context.rank + 1) % context.size
    work = window.wait_signal(peer, True)
    messages: list[str] = []

    def wait() -> None:
        messages.append(refusal(lambda: window.wait_signal(peer, False), dist.DistBackendError))

    thread = threading.Thread(target=wait)
    thread.start()
    dist.barrier(context.gloo)
    _get_default_group().abort()
    thread.join()
    messages.append(refusal(work.wait, dist.DistBackendError))
    assert len(messages) == 2
    for message in messages:
        assert "was aborted" in message


@pytest.mark.ranks(1, 2)
def test_an_abort_ends_waits_for_signals(fresh_pool: Pool) -> None:
    fresh_pool.run(check_abort_of_waits)


def check_death_in_register(context: Context) -> None:
    gc.collect()
    before = in_use()
    if context.rank == context.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert "has died" in refusal(lambda: new_window(zeros(1 << 20)), dist.DistBackendError)
    gc.collect()
    assert in_use() >= before + (4 << 20), "other ranks may have registered the window"


@pytest.mark.ranks(2, 3)
def test_a_tensor_stays_after_a_failed_registration(fresh_pool: Pool, ranks: int) -> None:
    with pytest.raises(RankFailure) as failure:
        fresh_pool.run(check_death_in_register)
    assert failure.value.kinds == {ranks - 1: DIED}, failure.value


def check_timeout(context: Context) -> None:
    buffer = zeros(4)
    window = new_window(buffer)
    options = timeout("WaitSignal", 50)
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
        for survivor in range(last):
            window.wait_signal(survivor, False)
        os.kill(os.getpid(), signal.SIGKILL)
    window.signal(last, False)  # this rank has all signals
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
    view = window.map_remote_tensor(context.size - 1)
    dist.barrier(context.gloo)
    if how == "abort":
        _get_default_group().abort()
    else:
        dist.destroy_process_group()
    require_refusals(window)
    assert not buffer.any()
    del window  # it may have the last reference to the group
    gc.collect()
    assert view.tolist() == [0.0] * 4  # the memory stays mapped


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
