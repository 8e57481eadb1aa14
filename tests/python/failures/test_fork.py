"""Forked children (DataLoader workers): they neither disturb the group nor hang at exit.

A child shares inherited segments with its parent; the rest of its memory is its own.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import assert_same, gathered, random_bits, random_numbers
from harness.reference import reduced
from harness.segments import in_segment, in_use, mappings
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torch_hbmcomm import memory

pytestmark = pytest.mark.ranks(1, 2, 4)


@pytest.fixture
def own_pool(ranks: int) -> Iterator[Pool]:
    """Yield a pool for a test that leaves its ranks changed."""
    own = Pool(ranks)
    yield own
    own.kill()


def check_data_loader(context: Context) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(context.rank)
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
    for _ in range(2):  # each epoch forks again, from a process whose group is in use
        loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(context.size)]
    dist.all_gather(everyone, weights)
    assert all(torch.equal(other, weights) for other in everyone)


def test_data_loader_workers_while_training(pool: Pool) -> None:
    pool.run(check_data_loader, limit=100)


def wait_for_child(pid: int) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the forked child hangs")


def check_child_that_allocates(context: Context) -> None:
    """Check that a child's allocations, writes and frees do not change the parent's data."""
    data = torch.full((100_000,), float(context.rank))
    dist.all_reduce(data)
    before = data.clone()
    work = dist.all_reduce(data, async_op=True)  # in flight while the child lives
    child = os.fork()
    if child == 0:
        # The child must not return into the parent's code.
        try:
            for _ in range(20):
                torch.full((100_000,), -1.0)
            os._exit(0)
        finally:
            os._exit(1)
    assert work is not None
    work.wait()
    assert wait_for_child(child) == 0
    assert torch.equal(data, before * context.size)
    dist.barrier()


def test_child_that_allocates(pool: Pool) -> None:
    pool.run(check_child_that_allocates)


def run_and_leave() -> None:
    """End a child normally: Python's exit handlers and C++ destructors run."""
    raise SystemExit(0)


def check_child_that_exits(context: Context) -> None:
    child = multiprocessing.get_context("fork").Process(target=run_and_leave)
    child.start()
    child.join(20)
    if child.exitcode is None:
        child.kill()
        raise AssertionError("the forked child hangs at exit")
    assert child.exitcode == 0
    total = torch.ones(10)
    dist.all_reduce(total)
    assert total[0].item() == context.size


def test_child_that_exits(pool: Pool) -> None:
    pool.run(check_child_that_exits)


def use_group_in_child(context: Context) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
            os.write(write, b"no error")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    wait_for_child(child)
    message = os.read(read, 10_000).decode()
    os.close(read)
    return message


@beyond_gloo
def test_group_in_a_child_is_an_error(own_pool: Pool) -> None:
    for message in own_pool.run(use_group_in_child):
        assert "fork" in message, message


# Segments.


class Reserve:
    """Tensors of many sizes in the segment, with private copies that show if a tensor changed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tensors = [self._new() for _ in range(12)]

    def churn(self) -> None:
        """Check a random tensor, and replace it by a new one."""
        place = self._context.own_random.randrange(len(self._tensors))
        tensor, copy = self._tensors[place]
        assert bytes(tensor.numpy()) == copy, f"{len(copy)} bytes changed"
        self._tensors[place] = self._new()

    def check(self) -> None:
        for tensor, copy in self._tensors:
            assert bytes(tensor.numpy()) == copy, f"{len(copy)} bytes changed"

    def _new(self) -> tuple[torch.Tensor, bytes]:
        count = self._context.own_random.choice([100, 5_000, 70_000, 400_000, 2_000_000])
        tensor = memory.empty(count, torch.uint8)
        tensor.copy_(random_bits(self._context, count, torch.uint8))
        return tensor, bytes(tensor.numpy())


class Churning(Dataset[torch.Tensor]):
    """Rows of a table in the parent's segment. A worker allocates and frees memory for each row."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> torch.Tensor:
        for size in (1_000, 60_000, 300_000):
            assert not in_segment(torch.full((size,), -1.0))
        return self._table[index] * 2


def check_loader_and_segment(context: Context, allocator: str) -> None:
    if allocator == "segment":
        memory.place_large_tensors_in_segment()
    reserve = Reserve(context)
    table = memory.empty((48, 5_000)).copy_(random_numbers(context, (48, 5_000), torch.float32))
    expected = table.numpy() * 2
    loader = DataLoader(
        Churning(table), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    for step, rows in enumerate(loader):
        assert (rows.numpy() == expected[4 * step : 4 * step + 4]).all()
        reserve.churn()
        data = random_numbers(context, 50_000, torch.float32)
        total = reduced(gathered(context, data), "sum")
        shared = memory.empty(50_000).copy_(data)
        dist.all_reduce(shared)
        assert_same(shared, total, f"all_reduce in step {step}")
    reserve.check()


@beyond_gloo
@pytest.mark.parametrize("allocator", ["default", "segment"])
def test_data_loader_workers_leave_the_segment_alone(own_pool: Pool, allocator: str) -> None:
    own_pool.run(check_loader_and_segment, allocator)


def fork(action: Callable[[], None]) -> int:
    """Start a child that calls `action` and leaves. Its exit code is 1 if `action` raises."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def check_child_neither_allocates_nor_frees(context: Context) -> None:
    memory.place_large_tensors_in_segment()
    tensors = [random_numbers(context, 100_000, torch.float32) for _ in range(3)]
    tensors.append(memory.empty(10).fill_(7))
    copies = [bytes(tensor.numpy()) for tensor in tensors]
    used = in_use()
    dist.barrier()

    def act() -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            assert bytes(tensor.numpy()) == copy
        with pytest.raises(RuntimeError, match="forked child"):
            memory.empty(10)
        assert not in_segment(torch.ones(1_000_000))
        tensors.clear()
        gc.collect()
        assert len(mappings("self")) == 1, "of its parent's, and of no local peer's"

    assert wait_for_child(fork(act)) == 0
    assert in_use() == used
    for tensor, copy in zip(tensors, copies, strict=True):
        assert bytes(tensor.numpy()) == copy


@beyond_gloo
def test_child_neither_allocates_nor_frees_in_the_segment(own_pool: Pool) -> None:
    own_pool.run(check_child_neither_allocates_nor_frees)


def check_inherited_tensors_are_shared(context: Context) -> None:
    """Fork: a child shares segments with its parent, and has copies of other memory."""
    shared, private = memory.empty(1_000).fill_(1), torch.ones(1_000)

    def act() -> None:
        shared.fill_(2)
        private.fill_(2)

    assert wait_for_child(fork(act)) == 0
    assert (shared == 2).all() and (private == 1).all()


@beyond_gloo
def test_inherited_tensors_are_shared(pool: Pool) -> None:
    pool.run(check_inherited_tensors_are_shared)


def leave() -> None:
    time.sleep(0.01)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def become_another_program() -> None:
    os.execv("/bin/true", ["true"])


def check_children_end(context: Context) -> None:
    """Collectives are in flight when the children of all ranks begin and when they end."""
    for action, code in ((leave, 0), (be_killed, -signal.SIGKILL), (become_another_program, 0)):
        for place in (torch.empty, memory.empty):
            data = random_numbers(context, 1_000_000, torch.float32)
            total = reduced(gathered(context, data), "sum")
            copies = [place(len(data)).copy_(data) for _ in range(6)]
            works = [dist.all_reduce(copy, async_op=True) for copy in copies[:3]]
            child = fork(action)
            works += [dist.all_reduce(copy, async_op=True) for copy in copies[3:]]
            assert wait_for_child(child) == code
            for work, copy in zip(works, copies, strict=True):
                assert work is not None
                work.wait()
                assert_same(copy, total, f"{action.__name__}, {place.__module__}")


@beyond_gloo
def test_children_that_end_leave_collectives_alone(pool: Pool) -> None:
    pool.run(check_children_end)
