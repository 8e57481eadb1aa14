"""If an operation on accelerator tensors fails, its error names the cause.

No memory is freed while a copy uses it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, RankFailure, accelerator, beyond_gloo
from harness.pool import DIED
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = [beyond_gloo, pytest.mark.ranks(2)]

# Elements of a tensor. It is below 64 KiB, so its host copy comes from PyTorch's pinned allocator.
# The test device counts the host copies that are freed during a transfer.
COUNT = 10_000


def check_devices(context: Context) -> None:
    own, other = torch.ones(4, device="late:0"), torch.ones(4, device="late:1")
    dist.all_reduce(own)
    with pytest.raises(
        ValueError, match=r"all_reduce: the tensor is on late:1, and group .* late:0"
    ):
        dist.all_reduce(other)
    backend: Any = _get_default_group()._get_backend(torch.device("late"))
    whole = torch.ones(4 * context.size, device="late:0")
    with pytest.raises(ValueError, match="the input is on cpu and the output on late:0"):
        backend._allgather_base(whole, torch.ones(4)).wait()
    with pytest.raises(ValueError, match="mixes the devices late:0 and late:1"):
        backend.allgather([[own.clone(), other.clone()]], [own]).wait()
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)  # the CPU's backend still works
    second = dist.new_group(backend="hbm")
    dist.all_reduce(other, group=second)
    assert other.cpu().tolist() == [context.size] * 4
    dist.destroy_process_group(second)
    dist.barrier()


def test_another_device(delayed_pool: Pool) -> None:
    delayed_pool.run(check_devices)


def check_capture(context: Context) -> None:
    delayed = accelerator.load()
    tensor = torch.ones(4, device=context.device)
    delayed.set_capturing(True)
    with pytest.raises(ValueError, match="the current stream of late:0 records a graph"):
        dist.all_reduce(tensor)
    delayed.set_capturing(False)
    dist.all_reduce(tensor)
    assert tensor.cpu().tolist() == [context.size] * 4


@pytest.mark.skipif(
    not hasattr(torch.Stream, "is_capturing"), reason="this PyTorch cannot tell of a capture"
)
def test_graph_capture(delayed_pool: Pool) -> None:
    delayed_pool.run(check_capture)


def check_unreported_capture(context: Context) -> None:
    """all_reduce works on a device that does not report if a stream records a graph.

    PyTorch 2.12 itself raises an error for such a device.
    """
    delayed = accelerator.load()
    delayed.tell_of_captures(False)
    tensor = torch.ones(4, device=context.device)
    dist.all_reduce(tensor)
    delayed.tell_of_captures(True)
    assert tensor.cpu().tolist() == [context.size] * 4


def test_device_that_does_not_report_captures(delayed_pool: Pool) -> None:
    delayed_pool.run(check_unreported_capture)


def check_no_pinned_memory(context: Context) -> None:
    delayed = accelerator.load()
    for count in (4, 3_000_001):  # host copies in PyTorch's memory, and in the segment
        tensor = torch.ones(count, device=context.device)
        delayed.fail_pinned(True)
        with pytest.raises(
            torch.OutOfMemoryError, match="no memory on the host, pinned for late:0"
        ):
            dist.all_reduce(tensor)
        delayed.fail_pinned(False)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), torch.full((count,), float(context.size)))


def test_out_of_pinned_memory(delayed_pool: Pool) -> None:
    delayed_pool.run(check_no_pinned_memory)


def check_timeout(context: Context) -> None:
    """Rank 0's device never reaches the operation. Every rank's error names this cause.

    A rank finds the cause itself, or gets it from the rank that times out first.
    """
    delayed = accelerator.load()
    tensor = torch.ones(COUNT, device=context.device)
    dist.barrier(context.gloo)  # so no rank still loads modules
    dist.all_reduce(tensor)
    if context.rank == 0:
        delayed.hold()
    tensor.fill_(1.0)
    with pytest.raises(
        dist.DistBackendError, match=r"whose input has not come from late:0|missing ranks: 0"
    ):
        dist.all_reduce(tensor)
    del tensor
    counts = delayed.pinned_counts()
    assert counts["freed_in_copy"] == 0
    delayed.release()
    delayed.synchronize()
    assert delayed.pinned_counts()["freed_in_copy"] == 0


def test_timeout_while_the_device_is_delayed(short_timeout_delayed_pool: Pool) -> None:
    short_timeout_delayed_pool.run(check_timeout)


def check_lost(context: Context) -> None:
    delayed = accelerator.load()
    tensor = torch.ones(COUNT, device=context.device)
    dist.all_reduce(tensor)
    dist.barrier()
    if context.rank == 0:
        delayed.lose()
    with pytest.raises(RuntimeError, match="the test accelerator is lost"):
        dist.all_reduce(tensor)
    assert delayed.pinned_counts()["freed_in_copy"] == 0


def test_lost_device(own_delayed_pool: Pool) -> None:
    own_delayed_pool.run(check_lost)


def check_death(context: Context) -> None:
    delayed = accelerator.load()
    tensor = torch.ones(COUNT, device=context.device)
    dist.all_reduce(tensor)
    if context.rank == 1:
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        assert works
        time.sleep(context.own_random.random() * 0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        for _ in range(1000):
            dist.all_reduce(tensor)
    delayed.synchronize()
    assert delayed.pinned_counts()["freed_in_copy"] == 0


def test_rank_that_dies(own_delayed_pool: Pool) -> None:
    with pytest.raises(RankFailure) as caught:
        own_delayed_pool.run(check_death)
    assert caught.value.kinds == {1: DIED}, str(caught.value)


def check_death_of_a_peer(context: Context) -> None:
    """Exchange messages with rank 1, which dies while tensors are copied from or to a device."""
    delayed = accelerator.load()
    tensors = [torch.ones(count, device=context.device) for count in (COUNT, 3_000_001)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    if context.rank == 1:
        dist.send(tensors[0], 0)
        works = [dist.isend(tensors[1], 0) for _ in range(2)]
        assert works
        time.sleep(context.own_random.random() * 0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    received = torch.zeros(COUNT, device=context.device)
    dist.recv(received, 1)
    assert torch.equal(received.cpu(), torch.full((COUNT,), 2.0))
    for call in (dist.irecv, dist.isend):
        with pytest.raises(dist.DistBackendError, match=r"rank 1\b.*has died"):
            for _ in range(1000):
                work = call(torch.ones(3_000_001, device=context.device), 1)
                assert work is not None
                work.wait()
    delayed.synchronize()
    assert delayed.pinned_counts()["freed_in_copy"] == 0


def test_peer_that_dies(own_delayed_pool: Pool) -> None:
    with pytest.raises(RankFailure) as caught:
        own_delayed_pool.run(check_death_of_a_peer)
    assert caught.value.kinds == {1: DIED}, str(caught.value)
