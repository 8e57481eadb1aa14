"""Training over device meshes on the accelerator, compared with training over Gloo on the CPU.

The trainings use FSDP2 with replicas of the shards (HSDP), and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.training import fully_sharded, mesh_of, net, train, whole
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

pytestmark = [beyond_gloo, pytest.mark.full]

Train = Callable[[Context, str, str], list[torch.Tensor]]  # the backend, the device


def check(context: Context, function: Train) -> None:
    expected = function(context, "gloo", "cpu")
    found = function(context, "hbm", context.device)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


def own_group(rank: int, all_ranks: list[list[int]], backend: str) -> dist.ProcessGroup:
    """Make a group of each list of ranks. Return the group that has `rank` as a member."""
    groups: list[dist.ProcessGroup] = [
        dist.new_group(ranks, backend=backend) for ranks in all_ranks
    ]
    return next(group for group, ranks in zip(groups, all_ranks, strict=True) if rank in ranks)


def hybrid(context: Context, backend: str, device: str) -> list[torch.Tensor]:
    """Train with FSDP2. Each half of the ranks has a replica, sharded over these ranks."""
    mesh = torch.arange(context.size).view(2, -1)
    groups = [own_group(context.rank, part.tolist(), backend) for part in (mesh.t(), mesh)]
    names = ("replicate", "shard")
    device_mesh = DeviceMesh.from_group(groups, device, mesh=mesh, mesh_dim_names=names)
    model = fully_sharded(device_mesh, net().to(device))
    return whole(train(model, context))


@pytest.mark.ranks(4)
def test_hybrid_sharding(delayed_pool: Pool) -> None:
    delayed_pool.run(check, hybrid, limit=240)


def tensor_parallel(context: Context, backend: str, device: str) -> list[torch.Tensor]:
    plan = {
        "first": ColwiseParallel(),
        "second": RowwiseParallel(),
        "third": ColwiseParallel(output_layouts=Replicate()),
    }
    mesh = mesh_of(dist.new_group(backend=backend), device)
    same_data = Context(0, context.size, None, context.folder, context.seed)
    return whole(train(parallelize_module(net().to(device), mesh, plan), same_data))


@pytest.mark.ranks(2)
def test_tensor_parallel(delayed_pool: Pool) -> None:
    delayed_pool.run(check, tensor_parallel, limit=240)
