"""bf16_hook: gradients are sent as bfloat16, over any group for CPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.layer_drop_ddp import Weighted, gradients, wrapped

import torch_hbmcomm as hbmcomm

pytestmark = pytest.mark.ranks(1, 2, 4)


def compress(context: Context, backend: str) -> None:
    """Compare with rounded means. bfloat16 has whole numbers below 257, and rounds 1023 to 1024."""
    group = dist.new_group(backend=backend)
    ddp = wrapped(Weighted(), process_group=group)
    ddp.register_comm_hook(group, hbmcomm.bf16_hook)
    of_ranks = [gradients(context.seed, rank, 0, context.size) for rank in range(context.size)]
    for own in of_ranks:
        own[0].fill_(1023 * context.size)
    ddp(*of_ranks[context.rank]).backward()
    for index, parameter in enumerate(ddp.parameters()):
        expected = torch.stack([own[index] for own in of_ranks]).mean(0)
        assert parameter.grad is not None
        assert_same(parameter.grad, expected.bfloat16().float(), f"parameter {index}")


@pytest.mark.parametrize("backend", ["hbm", "gloo"])
def test_the_mean_of_rounded_gradients(pool: Pool, backend: str) -> None:
    pool.run(compress, backend)
