"""Sharded parameters: FSDP2 within a node, outer steps between nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.outer_steps import WIDTH, adam, net, outer_vector, vector
from harness.training import fully_sharded
from harness.training import whole as parameters_whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_hbmcomm as hbmcomm

pytestmark = pytest.mark.ranks(4)


def train(model: nn.Module, optimizer: Any, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def whole(model: nn.Module) -> torch.Tensor:
    tensors = parameters_whole([one.detach() for one in model.parameters()])
    return torch.cat([one.flatten() for one in tensors])


def shard(context: Context) -> None:
    """Compare two nodes of two ranks with two workers that have whole models."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "shards"))
    model = fully_sharded(mesh["shards"], net())
    optimizer = adam(model)
    options: Any = {"every": 2, "delay": 1}
    outer = hbmcomm.OuterSteps(model, optimizer, process_group=mesh.get_group("nodes"), **options)
    node, local = divmod(context.rank, 2)
    plain = net()
    plain_optimizer = adam(plain)
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    reference = hbmcomm.OuterSteps(plain, plain_optimizer, process_group=group, **options)
    for step in range(7):
        generator = torch.Generator().manual_seed(context.seed + 10 * step + node)
        data = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
        train(model, optimizer, data.chunk(2)[local])
        outer.step()
        train(plain, plain_optimizer, data)
        reference.step()
        torch.testing.assert_close(whole(model), vector(plain), rtol=1e-7, atol=1e-7)
        with outer.weights():
            torch.testing.assert_close(
                whole(model), outer_vector(reference, plain), rtol=1e-7, atol=1e-7
            )
    outer.close()
    reference.close()
    torch.testing.assert_close(whole(model), vector(plain), rtol=1e-7, atol=1e-7)


def test_shards_meet_their_equals(pool: Pool) -> None:
    pool.run(shard)
