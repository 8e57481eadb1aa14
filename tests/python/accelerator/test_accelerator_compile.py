"""Functional collectives and DDP under torch.compile on the accelerator.

Results are compared with results over Gloo on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.training import batch, collectives, net, train
from torch.nn.parallel import DistributedDataParallel

pytestmark = [beyond_gloo, pytest.mark.ranks(2)]


def check_compiled(context: Context, backend: str) -> None:
    world = dist.group.WORLD
    assert world is not None and context.gloo is not None
    data, _ = batch(context, 0)
    expected = collectives(data, context.gloo)
    torch._dynamo.reset()
    function = torch.compile(collectives, backend=backend, fullgraph=True)
    for _ in range(3):
        found = function(data.to(context.device), world)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("eager", marks=pytest.mark.full)])
def test_functional_collectives(delayed_pool: Pool, backend: str) -> None:
    delayed_pool.run(check_compiled, backend, limit=240)


def check_compiled_ddp(context: Context, backend: str) -> None:
    torch._dynamo.reset()
    one_bucket: dict[str, Any] = {"bucket_cap_mb": 25}
    plain = DistributedDataParallel(net(), process_group=context.gloo, **one_bucket)
    expected = train(plain, context)
    ddp = DistributedDataParallel(net().to(context.device), **one_bucket)
    found = train(torch.compile(ddp, backend=backend), context)  # type: ignore[arg-type]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_ddp_compiled(delayed_pool: Pool, backend: str) -> None:
    delayed_pool.run(check_compiled_ddp, backend, limit=240)
