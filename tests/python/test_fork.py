"""Forked children (DataLoader workers): they neither disturb the group nor hang at exit."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.ranks(1, 2, 4)


def check_data_loader(context: Context) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(context.rank)
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
    for _ in range(2):  # each epoch forks anew, from a process whose group is in use
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
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the forked child hangs")


def check_child_that_allocates(context: Context) -> None:
    """A child that allocates, writes and frees tensors leaves the parent's data alone."""
    data = torch.full((100_000,), float(context.rank))
    dist.all_reduce(data)
    before = data.clone()
    work = dist.all_reduce(data, async_op=True)  # in flight while the child lives
    child = os.fork()
    if child == 0:
        # Nothing here may return into the parent's code.
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
    """Leaves a child in the ordinary way: Python's exit handlers and C++ destructors run."""
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
def test_group_in_a_child_is_an_error(fresh_pool: Pool) -> None:
    for message in fresh_pool.run(use_group_in_child):
        assert "fork" in message, message
