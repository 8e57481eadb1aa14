"""Tensors that are not plain: strided parameters, inference mode, arguments that overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo

pytestmark = beyond_gloo


def check_strided_parameter(context: Context) -> None:
    """A channels_last parameter requires grad and is strided."""
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
    """Whichever thread drives, in inference mode or out of it."""
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
    dist.barrier()  # nothing was sent, and the group goes on


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "check", [check_strided_parameter, check_inference_mode, check_shared_memory]
)
def test_tensors(pool: Pool, check: Any) -> None:
    pool.run(check)
