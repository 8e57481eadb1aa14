"""Tensors that are not plain: strided parameters, inference mode, arguments that overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from torch._C._distributed_c10d import ReduceScatterOptions
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = beyond_gloo


def check_strided_parameter(context: Context) -> None:
    """Broadcast a channels_last parameter, which requires grad and is strided."""
    layer = torch.nn.Conv2d(8, 8, 3)
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        layer.weight.fill_(context.rank + 1.0)
    for async_op in (False, True):
        work = dist.broadcast(layer.weight, context.size - 1, async_op=async_op)
        if work is not None:
            work.wait()
        assert (layer.weight == context.size).all()


def check_inference_mode(context: Context) -> None:
    """Tensors of inference mode are reduced, even by a thread that is not in this mode."""
    with torch.inference_mode():
        strided = torch.ones(1000, 1000).t()
        work = dist.all_reduce(strided, async_op=True)
        future = work.get_future()
    future.wait()
    with torch.inference_mode():
        assert (strided == context.size).all()


def check_shared_memory(context: Context) -> None:
    buffer = torch.arange(4.0 * context.size)
    parts = list(buffer.chunk(context.size))
    turned = parts[1:] + parts[:1]
    with pytest.raises(ValueError, match="share memory"):
        dist.all_to_all(turned, parts)
    with pytest.raises(ValueError, match="share memory"):
        dist.all_gather(parts, buffer[2:6])
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(4))
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce_coalesced([torch.ones(1).expand(4)])
    columns = torch.zeros(3, context.size + 1)[:, : context.size]
    same = [columns[:, 0] for _ in range(context.size)]
    with pytest.raises(ValueError, match="share memory"):
        dist.all_gather(same, torch.ones(3))
    with pytest.raises(ValueError, match="share memory"):
        dist.all_to_all(same, [torch.ones(3) for _ in same])
    dist.all_gather(list(columns.unbind(1)), torch.full((3,), float(context.rank)))
    assert columns[1].tolist() == list(range(context.size))
    dist.barrier()  # nothing was sent, and the group continues


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes, the first divisible by the ranks; strides

OVERLAPPING: list[Layout] = [((12,), (0,)), ((12, 2), (1, 1)), ((12, 3), (2, 3))]
APART: list[Layout] = [((12, 2), (2, 1)), ((12, 3), (1, 12)), ((12, 2), (3, 1)), ((12, 2), (2, 25))]


def into(context: Context, out: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return calls that write ones, or sums of ones, to `out`. For `recv`, rank 1 sends."""
    size, rank = context.size, context.rank
    ones = torch.ones(out.shape)
    parts, others = ones.chunk(size), [torch.zeros(out.shape) for _ in range(size - 1)]
    group = _get_default_group()
    mine = rank == 0
    return {
        "all_reduce": lambda: dist.all_reduce(out),
        "all_reduce_coalesced": lambda: group.allreduce_coalesced([out]).wait(),
        "broadcast": lambda: dist.broadcast(out, 0),
        "reduce": lambda: dist.reduce(out if mine else ones, 0),
        "all_gather": lambda: dist.all_gather([out, *others], ones),
        "all_gather_into_tensor": lambda: group._allgather_base(out, parts[0]).wait(),
        "gather": lambda: dist.gather(ones, [out, *others] if mine else None),
        "scatter": lambda: dist.scatter(
            out if mine else ones.clone(), [ones] * size if mine else None
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(out, [ones] * size),
        "reduce_scatter_tensor": lambda: group._reduce_scatter_base(
            out, torch.ones(size * out.shape[0], *out.shape[1:]), ReduceScatterOptions()
        ).wait(),
        "all_to_all": lambda: dist.all_to_all([out, *others], [ones] * size),
        "all_to_all_single": lambda: dist.all_to_all_single(out, ones),
        "recv": lambda: dist.recv(out, 1) if mine else dist.send(ones, 0) if rank == 1 else None,
    }


def check_layouts(context: Context) -> None:
    """Rank 0 alone passes `out` in a call with a root, so only its call can be refused."""
    for sizes, strides in APART:
        for name in into(context, torch.ones(sizes)):
            out = torch.ones(1000).as_strided(sizes, strides)
            into(context, out)[name]()
            summed = "reduce" in name and (name != "reduce" or context.rank == 0)
            assert (out == (context.size if summed else 1)).all(), name
    for sizes, strides in OVERLAPPING:
        for name, call in into(context, torch.ones(1000).as_strided(sizes, strides)).items():
            if name in ("reduce", "gather", "scatter", "recv") and context.rank != 0:
                continue
            with pytest.raises(ValueError, match="share memory"):
                call()
    dist.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "check", [check_strided_parameter, check_inference_mode, check_shared_memory, check_layouts]
)
def test_tensors(pool: Pool, check: Any) -> None:
    pool.run(check)
