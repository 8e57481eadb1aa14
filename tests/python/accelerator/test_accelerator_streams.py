"""The order of queued work before and after an operation on accelerator tensors. The host never
waits for the device. The delayed test device holds streams back so that a mistake shows.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, accelerator, beyond_gloo
from harness.data import assert_same, gathered, random_numbers

pytestmark = [beyond_gloo, pytest.mark.ranks(2)]

COUNT = 50_000


def total(context: Context, factor: float = 1.0) -> float:
    return factor * sum(range(1, context.size + 1))


def mine(context: Context, value: float = 1.0) -> torch.Tensor:
    """Return a tensor whose values this rank's current stream writes late."""
    return torch.zeros(COUNT, device=context.device).fill_(value * (context.rank + 1))


def check_producers_and_consumers(context: Context) -> None:
    """The host waits neither for a tensor's writer nor for its reader: every step is queued."""
    delayed = accelerator.load()
    tensor = mine(context)
    before = delayed.synchronizations()
    for step in range(20):
        dist.all_reduce(tensor)
        seen = tensor.clone()  # a consumer
        tensor.fill_(context.rank + 1.0).mul_(step + 2.0)  # the next producer
        assert delayed.synchronizations() == before, "the host waited for the device"
        expected = total(context, 1 if step == 0 else step + 1)
        assert torch.equal(seen.cpu(), torch.full((COUNT,), float(expected)))
        before = delayed.synchronizations()


def test_queued_before_and_after(delayed_pool: Pool) -> None:
    delayed_pool.run(check_producers_and_consumers)


def check_issue_does_not_block(context: Context) -> None:
    delayed = accelerator.load()
    tensor = torch.zeros(COUNT, device=context.device)
    delayed.hold()  # from here on this stream executes nothing
    tensor.fill_(context.rank + 1.0)
    works = [dist.all_reduce(tensor, async_op=True), dist.broadcast(tensor, 0, async_op=True)]
    assert not any(work.is_completed() for work in works if work is not None)
    delayed.release()
    for work in works:
        assert work is not None
        work.wait()
    assert torch.equal(tensor.cpu(), torch.full((COUNT,), total(context)))


def test_issue_does_not_block(delayed_pool: Pool) -> None:
    delayed_pool.run(check_issue_does_not_block)


def check_wait_blocks_the_stream_alone(context: Context) -> None:
    """wait() returns before the device has the result. Work queued after wait() sees the result."""
    delayed = accelerator.load()
    tensor = mine(context)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    other = torch.Stream(device=context.device)
    with other:
        before = delayed.synchronizations()
        work.wait()
        seen = tensor.clone()
        assert delayed.synchronizations() == before
        other.synchronize()
        assert work.is_completed()
        assert torch.equal(seen.cpu(), torch.full((COUNT,), total(context)))


def test_wait_blocks_the_current_stream(delayed_pool: Pool) -> None:
    delayed_pool.run(check_wait_blocks_the_stream_alone)


def check_in_a_row(context: Context) -> None:
    """Operations on one tensor see each other's results, without a wait() between them."""
    tensor = mine(context)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    for work in works:
        assert work is not None
        work.wait()
    expected = total(context) * context.size**4
    assert torch.equal(tensor.cpu(), torch.full((COUNT,), expected))


def test_in_a_row_on_one_tensor(delayed_pool: Pool) -> None:
    delayed_pool.run(check_in_a_row)


def check_many_tensors(context: Context) -> None:
    tensors = [mine(context, index + 1) for index in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index in context.own_random.sample(range(20), 20):
        works[index].wait()
        assert torch.equal(tensors[index].cpu(), torch.full((COUNT,), total(context, index + 1))), (
            index
        )


def test_many_operations_in_flight(delayed_pool: Pool) -> None:
    delayed_pool.run(check_many_tensors)


def check_memory_in_use(context: Context) -> None:
    """Drop tensors while copies of them are in flight.

    The tensors' memory must not be reused, and their host copies must not be freed.
    """
    delayed = accelerator.load()
    saved = []
    for index in range(30):
        tensor = mine(context, index + 1)
        work = dist.all_reduce(tensor, async_op=True)
        received = torch.empty(context.size * COUNT, device=context.device)
        gathering = dist.all_gather_into_tensor(received, mine(context, -1), async_op=True)
        assert work is not None and gathering is not None
        work.wait()
        saved.append((total(context, index + 1), tensor.clone()))
        del tensor, work, received, gathering
        torch.empty(COUNT, device=context.device).fill_(-1.0)
    for expected, seen in saved:
        assert torch.equal(seen.cpu(), torch.full((COUNT,), expected))
    gc.collect()
    counts = delayed.pinned_counts()
    assert counts["freed_in_copy"] == 0
    assert counts["reused_in_copy"] == 0


def test_memory_in_use(delayed_pool: Pool) -> None:
    delayed_pool.run(check_memory_in_use)


def check_memory_comes_back(context: Context) -> None:
    delayed = accelerator.load()

    def run() -> int:
        for _ in range(10):
            dist.all_reduce(mine(context))
        delayed.synchronize()
        counts = delayed.pinned_counts()
        return int(counts["in_use"] + counts["registered"])

    first = run()
    assert run() <= first + 2, "pinned memory piles up"


def test_host_memory_comes_back(delayed_pool: Pool) -> None:
    delayed_pool.run(check_memory_comes_back)


def check_future(context: Context) -> None:
    """Callbacks run on streams that wait for the result. The future's wait() makes the current
    stream wait for it."""
    tensor = mine(context)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    halved = work.get_future().then(lambda future: future.value()[0].clone().mul_(0.5))
    assert torch.equal(halved.wait().cpu(), torch.full((COUNT,), total(context, 0.5)))
    tensor = mine(context)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.get_future().wait()[0].cpu()[0].item() == total(context)


def test_future(delayed_pool: Pool) -> None:
    delayed_pool.run(check_future)


def check_messages(context: Context) -> None:
    """Messages with one tag arrive in the order of issue, from the device and the host."""
    peer = 1 - context.rank
    sizes = [context.shared_random.choice([1, 100, 70_000, 300_000]) for _ in range(30)]
    devices = [context.shared_random.choice([context.device, "cpu"]) for _ in sizes]
    sent, works = [], []
    for index, (size, device) in enumerate(zip(sizes, devices, strict=True)):
        sent.append(torch.zeros(size, device=device).fill_(100.0 * context.rank + index))
        works.append(dist.isend(sent[-1], peer))
    for index, size in enumerate(sizes):
        device = context.own_random.choice([context.device, "cpu"])
        received = torch.zeros(size, device=device)
        source = dist.recv(received, context.own_random.choice([None, peer]))
        assert source == peer
        assert torch.equal(received.cpu(), torch.full((size,), 100.0 * peer + index)), index
    for work in works:
        assert work is not None
        work.wait()


def test_messages_keep_their_order(delayed_pool: Pool) -> None:
    delayed_pool.run(check_messages)


def check_batched(context: Context) -> None:
    peer = 1 - context.rank
    data = random_numbers(context, COUNT, torch.float32)
    own, other = data.to(context.device).clone(), torch.empty(COUNT, device=context.device)
    operations = [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, other, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_same(other.cpu(), gathered(context, data)[peer], "batched")


def test_batched_messages(delayed_pool: Pool) -> None:
    delayed_pool.run(check_batched)


def check_side_stream(context: Context) -> None:
    """Check that an operation issued under another stream waits for that stream."""
    tensor = mine(context)
    side = torch.Stream(device=context.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor.mul_(3.0)
        dist.all_reduce(tensor)
        seen = tensor.clone()
        assert torch.equal(seen.cpu(), torch.full((COUNT,), total(context, 3)))


def test_issued_under_another_stream(delayed_pool: Pool) -> None:
    delayed_pool.run(check_side_stream)
