"""Counts beyond 2**31: one tensor of 2**31 + 1 one-byte elements.

Both ranks together take up to 6 GiB. The tests are skipped if less than 8 GiB are available.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool

COUNT = 2**31 + 1
NEEDED_GIB = 8  # 6 for this test, the rest for parallel tests

LIMIT = 280  # seconds; each of the four tests may have to wait for the others

pytestmark = [pytest.mark.full, pytest.mark.ranks(2), pytest.mark.timeout(1500)]


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Let one test of this file run at a time. Skip the test if too little memory is available."""
    with Path(gettempdir(), f"hbmcomm-large-counts-{os.getuid()}").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        skip_without_memory()
        yield


def skip_without_memory() -> None:
    found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    assert found
    available_gib = int(found[1]) >> 20
    if available_gib < NEEDED_GIB:
        pytest.skip(f"needs {NEEDED_GIB} GiB of memory, and {available_gib} are available")


def positions(context: Context) -> torch.Tensor:
    """Return positions, equal on all ranks: both ends, edges of 32-bit counts, and random ones."""
    edges = [0, 1, 2**30, 2**31 - 1, 2**31, COUNT - 1]
    return torch.tensor(edges + [context.shared_random.randrange(COUNT) for _ in range(5000)])


def value_at(where: torch.Tensor, rank: int) -> torch.Tensor:
    return (where % 53 + rank + 1).to(torch.uint8)


def marked(context: Context, where: torch.Tensor, count: int = COUNT) -> torch.Tensor:
    """Return a tensor of zeros, except known values at the positions."""
    data = torch.zeros(count, dtype=torch.uint8)
    data[where] = value_at(where, context.rank)
    return data


def check_all_reduce(context: Context) -> None:
    where = positions(context)
    data = marked(context, where)
    dist.all_reduce(data)
    expected = sum(value_at(where, rank) for rank in range(context.size))
    assert torch.equal(data[where], torch.as_tensor(expected))
    assert int(torch.count_nonzero(data)) == len(where.unique())


def check_broadcast(context: Context) -> None:
    where = positions(context)
    data = marked(context, where)
    dist.broadcast(data, 1)
    assert torch.equal(data[where], value_at(where, 1))


def check_all_gather(context: Context) -> None:
    """Check a result of more than 2**31 elements, gathered from smaller parts."""
    part = COUNT // context.size + 1
    where = positions(context) % part
    whole = torch.zeros(context.size * part, dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, marked(context, where, part))
    for rank in range(context.size):
        got = whole[rank * part :][:part]
        assert torch.equal(got[where], value_at(where, rank))
    assert int(torch.count_nonzero(whole)) == context.size * len(where.unique())


def check_send(context: Context) -> None:
    where = positions(context)
    if context.rank == 0:
        dist.send(marked(context, where), 1)
    else:
        data = torch.zeros(COUNT, dtype=torch.uint8)
        dist.recv(data, 0)
        assert torch.equal(data[where], value_at(where, 0))


@pytest.mark.parametrize(
    "check",
    [check_all_reduce, check_broadcast, check_all_gather, check_send],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_beyond_32_bits(pool: Pool, check: object) -> None:
    assert callable(check)
    pool.run(check, limit=LIMIT)
