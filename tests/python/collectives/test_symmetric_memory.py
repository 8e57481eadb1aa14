"""PyTorch's symmetric memory for CPU tensors of ranks that share memory."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import assert_same, gathered, random_bits
from harness.nodes import on_nodes
from harness.segments import in_segment, in_use
from harness.windows import COUNT, neighbours, refusal
from torch._C._distributed_c10d import FileStore
from torch.distributed import _symmetric_memory

from torch_hbmcomm import Options

pytestmark = beyond_gloo

symmetric: Any = _symmetric_memory
MIB = 1 << 20


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made: torch.Tensor = symmetric.empty(*shape, dtype=dtype, device="cpu")
    return made


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> Any:
    return symmetric.rendezvous(tensor, group or world())


def reclaimed() -> int:
    """Return the bytes in use after a new tensor has returned the blocks that no rank uses."""
    gc.collect()
    empty(1)
    return in_use()


def check_buffers(context: Context, dtype: torch.dtype) -> None:
    tensor = empty(COUNT, dtype=dtype)
    assert symmetric.is_symm_mem_tensor(tensor)
    assert in_segment(tensor)
    memory = rendezvous(tensor)
    assert (memory.rank, memory.world_size) == (context.rank, context.size)
    assert memory.buffer_size == tensor.nbytes
    assert memory.buffer_ptrs[context.rank] == tensor.data_ptr()
    for _ in range(3):
        data = random_bits(context, COUNT, dtype)
        everyone = gathered(context, data)
        tensor.copy_(data)
        memory.barrier()
        for peer in range(context.size):
            assert_same(memory.get_buffer(peer, (COUNT,), dtype), everyone[peer], f"rank {peer}")
            part = memory.get_buffer(peer, (4, 5), dtype, 10)
            assert_same(part.reshape(-1), everyone[peer][10:30], f"a part of rank {peer}")
        memory.barrier()  # the memory is free again
    assert rendezvous(tensor).buffer_ptrs == memory.buffer_ptrs


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_ranks_read_the_buffers_of_others(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(check_buffers, dtype)


def check_ring(context: Context) -> None:
    """Write into the next rank's buffer, then signal. That rank sees the data after its wait."""
    after, before = neighbours(context)
    tensor = empty(COUNT).zero_()
    memory = rendezvous(tensor)
    memory.barrier()
    there = memory.get_buffer(after, (COUNT,), torch.float32)
    for turn in range(1, 20):
        there.fill_(turn * context.size + context.rank)
        memory.put_signal(after)
        memory.wait_signal(before)
        assert (tensor == turn * context.size + before).all()
        memory.put_signal(before, 1)  # the memory is free again
        memory.wait_signal(after, 1)


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_signal_follows_the_writes_before_it(pool: Pool) -> None:
    pool.run(check_ring)


def check_signal_pads(context: Context) -> None:
    memory = rendezvous(empty(5))
    after, _ = neighbours(context)
    assert not memory.get_signal_pad(context.rank).any()
    memory.barrier()
    memory.get_signal_pad(after, (context.size,), torch.int64)[context.rank] = context.rank + 1
    memory.barrier()
    own = memory.get_signal_pad(context.rank, (context.size,), torch.int64)
    writer = (context.rank - 1) % context.size
    assert own.tolist() == [rank + 1 if rank == writer else 0 for rank in range(context.size)]


@pytest.mark.ranks(1, 2, 4)
def test_signal_pads_start_as_zeros(pool: Pool) -> None:
    pool.run(check_signal_pads)


def check_missing_signal(context: Context) -> None:
    memory = rendezvous(empty(4))
    if context.rank == 0:
        memory.put_signal(1, 2)
    else:
        message = refusal(lambda: memory.wait_signal(0, 3, 50), dist.DistBackendError)
        assert re.search(r"wait_signal from rank 0 .* timed out after 50 ms", message), message
        assert re.search(r"missing ranks: 0 \(pid", message), message
        memory.wait_signal(0, 2)
    memory.barrier()
    dist.barrier()  # the group continues


@pytest.mark.ranks(2)
def test_a_wait_times_out_without_a_signal_on_its_channel(pool: Pool) -> None:
    pool.run(check_missing_signal)


def check_missing_rank(context: Context) -> None:
    """Rank 0 gives up a barrier, whose signals stay for the other ranks."""
    memory = rendezvous(empty(4))
    if context.rank == 0:
        message = refusal(lambda: memory.barrier(1, 50), dist.DistBackendError)
        assert re.search(r"missing ranks: \d \(pid", message), message
        for call in (memory.barrier, partial(memory.put_signal, 1), partial(memory.wait_signal, 1)):
            message = refusal(partial(call, channel=1), dist.DistBackendError)
            assert "a barrier on channel 1 failed earlier on this rank" in message
    memory.barrier()


@pytest.mark.ranks(2, 3)
def test_a_channel_is_refused_after_a_failed_barrier(pool: Pool) -> None:
    pool.run(check_missing_rank)


def check_threads(context: Context) -> None:
    """Two threads of each rank are in barriers of different channels, in any order."""
    memory = rendezvous(empty(4))
    counts = empty(2).zero_()
    shared = rendezvous(counts)
    shared.barrier()

    def run(channel: int) -> None:
        for turn in range(1, 50):
            counts[channel] = turn
            memory.barrier(channel)
            for peer in range(context.size):
                assert shared.get_buffer(peer, (2,), torch.float32)[channel] == turn
            memory.barrier(channel)
        passed.append(channel)

    passed: list[int] = []
    threads = [threading.Thread(target=run, args=(channel,)) for channel in range(2)]
    for thread in threads[:: -1 if context.rank % 2 else 1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(passed) == [0, 1]


@pytest.mark.ranks(2, 3)
def test_barriers_of_two_channels(pool: Pool) -> None:
    pool.run(check_threads)


def check_collective(context: Context) -> None:
    tensor = empty(COUNT * 10).fill_(context.rank + 1)
    memory = rendezvous(tensor)
    dist.all_reduce(tensor)
    memory.barrier()
    for peer in range(context.size):
        found = memory.get_buffer(peer, tensor.shape, torch.float32)
        assert (found == context.size * (context.size + 1) / 2).all()
    memory.barrier()


@pytest.mark.ranks(2, 4)
def test_collectives_take_symmetric_memory(pool: Pool) -> None:
    pool.run(check_collective)


def check_subgroups(context: Context) -> None:
    """Map one tensor in two groups."""
    tensor = empty(1).fill_(context.rank)
    pairs = [[rank, rank + 1] for rank in range(0, context.size, 2)]
    pair = dist.new_subgroups_by_enumeration(pairs)[0]
    whole, part = rendezvous(tensor), rendezvous(tensor, pair)
    assert (part.rank, part.world_size) == (context.rank % 2, 2)
    part.barrier()
    other = context.rank ^ 1
    assert part.get_buffer(1 - part.rank, (1,), torch.float32).item() == other
    whole.barrier()
    assert whole.get_buffer(other, (1,), torch.float32).item() == other
    whole.barrier()


@pytest.mark.ranks(2, 4)
def test_a_tensor_in_two_groups(pool: Pool) -> None:
    pool.run(check_subgroups)


# The end of a tensor.


def settle(context: Context) -> int:
    """Return the bytes in use after all ranks have returned the blocks that no program uses."""
    for _ in range(2):  # each rank releases the windows, then frees its blocks
        reclaimed()
        dist.barrier(context.gloo)
    return reclaimed()


def check_release(context: Context) -> None:
    before = settle(context)
    tensor = empty(MIB)
    memory = rendezvous(tensor)
    memory.barrier()
    last = context.size - 1
    del tensor
    if context.rank != last:
        del memory
    dist.barrier(context.gloo)
    assert reclaimed() >= before + 4 * MIB, "the last rank may still read the memory"
    dist.barrier(context.gloo)
    if context.rank == last:
        memory.get_buffer(0, (MIB,), torch.float32).sum()
        del memory
    assert settle(context) <= before


@pytest.mark.ranks(1, 2, 3)
def test_memory_stays_until_no_rank_uses_it(pool: Pool) -> None:
    pool.run(check_release)


def check_group_end(context: Context) -> None:
    """A group with the name of an earlier group meets again."""
    tensor = empty(1).fill_(context.rank)
    first = rendezvous(tensor)
    first.barrier()
    dist.destroy_process_group()
    store = FileStore(str(context.folder / f"again{context.seed}"), context.size)
    dist.init_process_group("hbm", store=store, rank=context.rank, world_size=context.size)
    second = rendezvous(tensor)
    second.barrier()
    for peer in range(context.size):
        assert second.get_buffer(peer, (1,), torch.float32).item() == peer
    assert refusal(first.barrier, dist.DistBackendError) or context.size == 1
    second.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_a_tensor_outlives_its_group(fresh_pool: Pool) -> None:
    fresh_pool.run(check_group_end)


# Mistakes.

Mistake = Callable[[Context, Any], Any]
MISTAKES: dict[str, tuple[Mistake, str]] = {
    "no such channel": (
        lambda c, m: m.put_signal(0, 32),
        "no channel 32; the channels are 0 to 31",
    ),
    "a negative channel": (lambda c, m: m.wait_signal(0, -1), "no channel -1"),
    "a barrier on no channel": (lambda c, m: m.barrier(99), "no channel 99"),
    "signal to no rank": (lambda c, m: m.put_signal(c.size), "rank [1-9]"),
    "wait for no rank": (lambda c, m: m.wait_signal(-1), "rank -1"),
    "ordinary tensor": (lambda c, m: rendezvous(torch.zeros(4)), "is not symmetric memory"),
    "group of Gloo": (lambda c, m: rendezvous(empty(4), c.gloo), "needs a group of hbm"),
}


def check_mistakes(context: Context) -> None:
    memory = rendezvous(empty(4))
    for name, (call, words) in MISTAKES.items():
        message = refusal(partial(call, context, memory))
        assert re.search(words, message), f"{name}: {message}"
    memory.barrier()


@pytest.mark.ranks(2)
def test_mistakes_are_refused(pool: Pool) -> None:
    pool.run(check_mistakes)


def check_sizes(context: Context) -> None:
    message = refusal(lambda: rendezvous(empty(4 + context.rank)), dist.DistBackendError)
    assert "make tensors of one size on all ranks" in message
    rendezvous(empty(4)).barrier()


@pytest.mark.ranks(2, 3)
def test_ranks_with_tensors_of_different_sizes(pool: Pool) -> None:
    pool.run(check_sizes)


def check_policy(context: Context) -> None:
    group = dist.new_group(pg_options=Options(memory="ddr"))
    message = refusal(lambda: rendezvous(empty(4), group))
    assert "set HBMCOMM_MEMORY=ddr on all ranks" in message
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_group_of_another_policy_is_refused(pool: Pool) -> None:
    pool.run(check_policy)


def check_nodes(context: Context, layout: str) -> None:
    message = refusal(lambda: rendezvous(empty(4)))
    apart = [rank for rank, node in enumerate(layout) if node != layout[context.rank]]
    for rank in apart:
        assert re.search(rf"\b{rank} \(pid \d+", message), message
    assert "make a group of the ranks of each node" in message
    own = dist.new_subgroups_by_enumeration([[0, 1], [2]])[0]
    rendezvous(empty(4), own).barrier()
    dist.barrier()


def test_ranks_of_several_nodes_are_refused() -> None:
    pool = Pool(3, bare=True)
    try:
        pool.run(on_nodes, "aab", check_nodes, "aab")
        assert not any(pool.close())
    finally:
        pool.kill()
