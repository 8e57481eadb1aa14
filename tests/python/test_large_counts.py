"""Counts beyond 2**31: one tensor of 2**31 + 1 one-byte elements.

Takes about 6 GiB a rank; skipped, with the figures, where that is not free.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool

COUNT = 2**31 + 1
NEEDED_BYTES = 18 * 2**30

FREE_BYTES = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(
        FREE_BYTES < NEEDED_BYTES,
        reason=f"needs {NEEDED_BYTES >> 30} GiB of free memory, found {FREE_BYTES >> 30}",
    ),
]


def positions(context: Context) -> torch.Tensor:
    """The ends, the edges of 32-bit counts, and random places; the same on every rank."""
    edges = [0, 1, 2**30, 2**31 - 1, 2**31, COUNT - 1]
    return torch.tensor(edges + [context.shared_random.randrange(COUNT) for _ in range(5000)])


def value_at(where: torch.Tensor, rank: int) -> torch.Tensor:
    return (where % 53 + rank + 1).to(torch.uint8)


def marked(context: Context, where: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros but for known values at the positions."""
    data = torch.zeros(COUNT, dtype=torch.uint8)
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
    """The whole, not the part, is beyond 2**31."""
    part = COUNT // context.size + 1
    data = torch.full((part,), context.rank + 1, dtype=torch.uint8)
    data[0], data[-1] = 100 + context.rank, 200 + context.rank
    whole = torch.zeros(context.size * part, dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, data)
    for rank in range(context.size):
        got = whole[rank * part :][:part]
        assert got[0] == 100 + rank and got[-1] == 200 + rank
        assert bool((got[1 : 1 << 20] == rank + 1).all()) and int(got[part // 2]) == rank + 1


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
    pool.run(check, limit=120)
