"""Twins of an accelerator's tensors in the segment that the ranks of a node share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, accelerator, beyond_gloo
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = [beyond_gloo, pytest.mark.ranks(2, 4)]

LARGE = 5 << 20  # bytes


def in_segment(context: Context) -> int:
    backend: Any = _get_default_group()._get_backend(torch.device(context.device))
    return int(backend.memory_stats()["segment.in_use_bytes"])


def check_twins(context: Context) -> None:
    """Large twins lie in the segment, pinned by registering; one block serves one after another."""
    late = accelerator.load()
    tensor = torch.zeros(LARGE // 4, device=context.device).fill_(context.rank + 1.0)
    before, counts = in_segment(context), late.pinned_counts()
    dist.all_reduce(tensor)
    held, after = in_segment(context), late.pinned_counts()
    assert held - before >= LARGE
    assert after["registered"] == counts["registered"] + 1
    assert after["allocated"] == counts["allocated"], "PyTorch's pinned memory was used too"
    for _ in range(5):
        late.synchronize()
        torch.accelerator.synchronize()
        dist.broadcast(tensor, 0)
    assert in_segment(context) <= held + 2 * LARGE, "each operation takes a block"
    total = sum(range(1, context.size + 1))
    assert torch.equal(tensor.cpu(), torch.full((LARGE // 4,), float(total)))
    assert late.pinned_counts()["freed_in_copy"] == 0


def test_twins_in_the_segment(late_pool: Pool) -> None:
    late_pool.run(check_twins)


def check_small(context: Context) -> None:
    late = accelerator.load()
    before = late.pinned_counts()
    dist.all_reduce(torch.ones(100, device=context.device))
    after = late.pinned_counts()
    assert after["registered"] == before["registered"]
    assert after["allocated"] == before["allocated"] + 1


def test_small_twins_are_pytorchs(late_pool: Pool) -> None:
    late_pool.run(check_small)
