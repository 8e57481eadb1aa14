"""Peers that never come, die or abort: a precise error on every survivor, and a clean exit."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, SHORT_TIMEOUT, Context, Pool, RankFailure, beyond_gloo
from harness.events import await_rank, tell
from harness.pool import DIED
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import _get_default_group

# A group's timeout in tests whose error must come sooner, and for another reason.
LONG_TIMEOUT = 600.0
# The seconds by which an error may be late on a loaded machine. They are fewer than
# harness.worker.FORMING, the timeout of an impatient pool's groups until another is set.
SLACK = 40.0

Operation = Callable[[Context], Any]


def ones(count: int = 8) -> torch.Tensor:
    return torch.ones(count)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": lambda c: dist.all_reduce(ones()),
    "all_reduce_large": lambda c: dist.all_reduce(ones(1_000_000)),
    "all_reduce_async": lambda c: _get_default_group().allreduce([ones()]).wait(),
    "reduce": lambda c: dist.reduce(ones(), 0),
    "all_gather": lambda c: dist.all_gather([ones() for _ in range(c.size)], ones()),
    "all_gather_into_tensor": lambda c: dist.all_gather_into_tensor(ones(8 * c.size), ones()),
    "reduce_scatter": lambda c: dist.reduce_scatter(ones(), [ones() for _ in range(c.size)]),
    "all_to_all": lambda c: dist.all_to_all_single(ones(8 * c.size), ones(8 * c.size)),
    "barrier": lambda c: dist.barrier(),
    "gather": lambda c: dist.gather(
        ones(), [ones() for _ in range(c.size)] if c.rank == 0 else None, 0
    ),
}


def attempt(context: Context, call: Operation) -> tuple[str, str, float]:
    """Return the class name and message of the call's error, and the seconds until the error."""
    start = time.monotonic()
    try:
        call(context)
    except Exception as error:
        is_backend_error = isinstance(error, dist.DistBackendError)
        kind = "DistBackendError" if is_backend_error else type(error).__name__
        return kind, str(error), time.monotonic() - start
    raise AssertionError("no error although a rank never came")


def without_last(context: Context, name: str) -> tuple[str, str, float, float] | None:
    """Return the error, and the times at which the operation began and failed.

    The last rank does not call the operation. Ranks that only send to a root return None: they may
    complete without the last rank.
    """
    to_root = name in ("gather", "reduce")
    if context.rank == context.size - 1 or (to_root and context.rank > 0):
        return None
    kind, message, seconds = attempt(context, OPERATIONS[name])
    now = time.monotonic()
    return kind, message, now - seconds, now


@beyond_gloo
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_absent_rank(impatient_pool: Pool, ranks: int, name: str) -> None:
    outcomes = impatient_pool.run(without_last, name, limit=SHORT_TIMEOUT + SLACK)
    absent = ranks - 1
    failures = [outcome for outcome in outcomes if outcome]
    first = min(began for _, _, began, _ in failures)  # the first timeout ends all waits
    for kind, message, _, failed in failures:
        assert kind == "DistBackendError", message
        assert failed - first > SHORT_TIMEOUT * 0.5, f"came after {failed - first} s: {message}"
        operation = "_?".join(name.split("_")[:2])
        assert re.search(operation, message), message
        assert re.search(r"(?i)group", message), message
        assert re.search(r"#\d+", message), message
        assert re.search(rf"(?i)ranks?\b([^.;]|\.\b)*\b{absent}\b", message), message
        assert re.search(r" (Timed out|closed|timeout) ", message), "PyTorch's suite looks for it"
    assert impatient_pool.close() == [0] * ranks


def lonely_recv(context: Context) -> tuple[str, str, float] | None:
    if context.rank:
        return None
    return attempt(context, lambda c: dist.recv(ones(), 1))


def lonely_large_send(context: Context) -> tuple[str, str, float] | None:
    if context.rank:
        return None
    return attempt(context, lambda c: dist.send(ones(4_000_000), 1))


def lonely_recv_from_any(context: Context) -> tuple[str, str, float] | None:
    if context.rank:
        return None
    return attempt(context, lambda c: dist.recv(ones()))


@beyond_gloo
@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", [lonely_recv, lonely_large_send, lonely_recv_from_any])
def test_message_without_peer(impatient_pool: Pool, call: Callable[..., Any]) -> None:
    outcome, _ = impatient_pool.run(call, limit=SHORT_TIMEOUT + SLACK)
    kind, message, _ = outcome
    assert kind == "DistBackendError", message
    assert re.search(r"(?i)send|recv|receive", message), message
    assert impatient_pool.close() == [0, 0]


def short_wait(context: Context) -> tuple[str, str, float] | None:
    """wait(timeout) gives up before the operation's own timeout."""
    given_up = context.folder / f"given_up{context.seed}"
    if context.rank:
        while not given_up.exists():
            time.sleep(0.01)
        dist.all_reduce(ones())
        return None
    work = dist.all_reduce(ones(), async_op=True)
    assert work is not None
    outcome = attempt(context, lambda c: work.wait(timedelta(milliseconds=200)))
    given_up.touch()
    return outcome


@pytest.mark.ranks(2)
def test_wait_with_a_shorter_timeout(ranks: int) -> None:
    pool = Pool(ranks, timeout=LONG_TIMEOUT)
    try:
        outcome, _ = pool.run(short_wait, limit=SLACK)
        assert outcome[2] < SLACK, outcome
    except RankFailure as failure:
        # Rank 0, whose wait() timed out, must return its error. Rank 1 may fail.
        assert 0 not in failure.kinds, failure
    finally:
        pool.kill()


def group_timeout(context: Context) -> tuple[str, str, float] | None:
    """Check that a sub-group has new_group's timeout, not the timeout of the default group."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    dist.all_reduce(ones(), group=group)
    if context.rank:
        return None
    return attempt(context, lambda c: dist.all_reduce(ones(), group=group))


@beyond_gloo
@pytest.mark.ranks(2)
def test_timeout_of_a_subgroup(ranks: int) -> None:
    pool = Pool(ranks, timeout=LONG_TIMEOUT)
    try:
        kind, message, _ = pool.run(group_timeout, limit=SLACK)[0]
        assert kind == "DistBackendError", message
    finally:
        pool.kill()


def timeout_from_the_start(context: Context, seconds: float) -> tuple[str, str, float] | None:
    """Check that a group has init_process_group's timeout, without set_timeout()."""
    import torch_hbmcomm  # noqa: F401  # so that forming the group takes a moment

    tell(context, "loaded")
    for other in range(context.size):
        await_rank(context, "loaded", other)
    dist.init_process_group(
        BACKEND,
        store=FileStore(str(context.folder / "store"), context.size),
        rank=context.rank,
        world_size=context.size,
        timeout=timedelta(seconds=seconds),
    )
    dist.all_reduce(ones())
    if context.rank:
        return None
    return attempt(context, lambda c: dist.all_reduce(ones()))


@beyond_gloo
@pytest.mark.ranks(2)
def test_timeout_of_init_process_group(bare_pool: Pool) -> None:
    seconds = 5.0  # forming the group takes some of them
    kind, message, passed = bare_pool.run(timeout_from_the_start, seconds, limit=2 * SLACK)[0]
    assert kind == "DistBackendError", message
    assert seconds * 0.5 < passed < seconds + SLACK, message
    assert bare_pool.close() == [0, 0]


def after_failure(context: Context) -> list[str]:
    """Check that a failed group raises immediately, with the cause."""
    if context.rank == context.size - 1:
        return []
    attempt(context, lambda c: dist.all_reduce(ones()))
    _get_default_group().set_timeout(timedelta(seconds=LONG_TIMEOUT))
    return [attempt(context, lambda c: dist.broadcast(ones(), 0))[1]]


@beyond_gloo
@pytest.mark.ranks(2, 4)
def test_failed_group_stays_failed(impatient_pool: Pool, ranks: int) -> None:
    for messages in impatient_pool.run(after_failure, limit=SHORT_TIMEOUT + SLACK)[:-1]:
        assert messages[0]
    assert impatient_pool.close() == [0] * ranks


def abort_from_thread(context: Context) -> tuple[str, str, float] | None:
    """abort() on another thread ends the wait of rank 0, long before the timeout."""
    if context.rank:
        return None
    threading.Timer(0.3, _get_default_group().abort).start()
    return attempt(context, lambda c: dist.all_reduce(ones()))


@beyond_gloo
@pytest.mark.ranks(2)
def test_abort_unblocks(ranks: int) -> None:
    pool = Pool(ranks, timeout=LONG_TIMEOUT)
    try:
        kind, message, _ = pool.run(abort_from_thread, limit=SLACK)[0]
        assert kind == "DistBackendError", message
        assert re.search("(?i)abort", message), message
        assert pool.close() == [0] * ranks
    finally:
        pool.kill()


def new_group_after_failure(context: Context) -> float:
    """After a timeout the ranks may destroy the group and form another."""
    if context.rank != context.size - 1:
        attempt(context, lambda c: dist.all_reduce(ones()))
    dist.destroy_process_group()
    dist.init_process_group(
        BACKEND,
        store=FileStore(str(context.folder / "second"), context.size),
        rank=context.rank,
        world_size=context.size,
        timeout=timedelta(seconds=60),
    )
    total = ones()
    dist.all_reduce(total)
    return total[0].item()


@beyond_gloo
@pytest.mark.ranks(2, 4)
def test_new_group_after_a_timeout(impatient_pool: Pool, ranks: int) -> None:
    assert impatient_pool.run(new_group_after_failure) == [float(ranks)] * ranks


# Death.


def die_or_wait(context: Context, size: int) -> tuple[str, str, float] | None:
    dist.all_reduce(ones())
    if context.rank == context.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(context, lambda c: dist.all_reduce(ones(size)))


@beyond_gloo
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("size", [1, 2_000_000])
def test_killed_rank(fresh_pool: Pool, ranks: int, size: int, nothing_left: None) -> None:
    """Survivors have their error long before the timeout, and still answer the pool."""
    with pytest.raises(RankFailure) as failure:
        fresh_pool.run(die_or_wait, size)
    assert failure.value.kinds == {ranks - 1: DIED}, failure.value


# hbmcomm.monitored_barrier


def monitored(context: Context, wait_all: bool) -> tuple[str, str, float] | None:
    import torch_hbmcomm as hbmcomm

    hbmcomm.monitored_barrier(timeout=timedelta(seconds=60))
    if context.rank in (1, 2):
        return None
    return attempt(
        context,
        lambda c: hbmcomm.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all),
    )


@beyond_gloo
@pytest.mark.ranks(4)
@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_who_is_missing(ranks: int, wait_all: bool) -> None:
    pool = Pool(ranks)
    try:
        outcomes = pool.run(monitored, wait_all)
    finally:
        pool.kill()
    message = outcomes[0][1]
    assert re.search(r"\b1\b", message), message
    if wait_all:
        assert re.search(r"\b1\b.*\b2\b", message), message
    # Gloo's words, which PyTorch's suite looks for.
    late = "Ranks 1, 2" if wait_all else "Rank 1"
    assert f"{late} failed to pass monitoredBarrier" in message, message
    assert "Rank 0 timed out in monitoredBarrier" in message, message
    reached = "Rank 3 successfully reached monitoredBarrier, but received errors while waiting"
    assert f"{reached} for send/recv from rank 0" in outcomes[3][1], outcomes[3]


def monitored_without_time(context: Context) -> list[str]:
    import torch_hbmcomm as hbmcomm

    errors = []
    for turn in range(10):
        if turn == 0 and context.rank == 1:
            await_rank(context, "left the first barrier", 0)
        try:
            hbmcomm.monitored_barrier(timeout=timedelta(0))
        except RuntimeError as error:
            errors.append(str(error))
        if turn == 0 and context.rank == 0:
            tell(context, "left the first barrier")
    return errors


@beyond_gloo
@pytest.mark.ranks(2)
def test_monitored_barrier_without_time_blames_no_store(ranks: int) -> None:
    pool = Pool(ranks)
    try:
        outcomes = pool.run(monitored_without_time)
    finally:
        pool.kill()
    for errors in outcomes:
        assert all("monitored_barrier of" in error for error in errors), errors
    assert all(outcomes), "the first barrier did not run out of time"
