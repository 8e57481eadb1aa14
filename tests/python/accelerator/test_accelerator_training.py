"""Training, functional collectives, device meshes and splits on the accelerator.

Results are compared with results over Gloo on the CPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import Context, Pool, beyond_gloo
from harness.data import assert_same, gathered, placed, random_numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel

from benchmarks import gpu

pytestmark = [beyond_gloo, pytest.mark.ranks(2, 4)]

STEPS = 5


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def check_ddp(context: Context) -> None:
    torch.manual_seed(context.seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    on_device = copy.deepcopy(model).to(context.device)
    batches = [random_numbers(context, (8, 20), torch.float32) for _ in range(STEPS)]
    expected = train(DistributedDataParallel(model, process_group=context.gloo), batches)
    several_buckets = DistributedDataParallel(on_device, bucket_cap_mb=0.002)
    got = train(several_buckets, [batch.to(context.device) for batch in batches])
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_ddp(delayed_pool: Pool) -> None:
    delayed_pool.run(check_ddp)


def check_functional(context: Context) -> None:
    data = random_numbers(context, 1000, torch.float32)
    group = _get_default_group()
    everyone = gathered(context, data)
    whole = functional.all_gather_tensor(placed(context, data), 0, group)
    assert_same(whole.cpu(), torch.cat(everyone), "all_gather_tensor")
    summed = functional.all_reduce(placed(context, data), "sum", group) * 1.0
    torch.testing.assert_close(summed.cpu(), torch.stack(everyone).sum(0))


def test_functional_collectives(delayed_pool: Pool) -> None:
    delayed_pool.run(check_functional)


def check_meshes(context: Context) -> None:
    mesh = init_device_mesh(context.device, (context.size // 2, 2), mesh_dim_names=("dp", "tp"))
    tensor = torch.full((3,), context.rank + 1.0, device=context.device)
    dist.all_reduce(tensor, group=mesh.get_group("tp"))
    first = context.rank // 2 * 2 + 1
    assert tensor.cpu().tolist() == [2.0 * first + 1] * 3
    mixed = dist.new_group(backend=f"cpu:gloo,{context.device}:hbm")
    for device, name in (("cpu", "gloo"), (context.device, "hbm")):
        assert mixed._get_backend(torch.device(device)).name() == name
        ones = torch.ones(3, device=device)
        dist.all_reduce(ones, group=mixed)
        assert ones.cpu().tolist() == [context.size] * 3
    dist.destroy_process_group(mixed)


def test_meshes_and_mixed_groups(delayed_pool: Pool) -> None:
    delayed_pool.run(check_meshes)


def check_split(context: Context) -> None:
    group = _get_default_group()
    ranks = [[rank] for rank in range(context.size)] if context.size == 2 else [[0, 1], [2, 3]]
    own = next(part for part in ranks if context.rank in part)
    half = group.split_group(own, opts=None)
    assert half is not None
    tensor = torch.ones(3, device=context.device)
    half.allreduce([tensor]).wait()
    assert tensor.cpu().tolist() == [len(own)] * 3


def test_split(delayed_pool: Pool) -> None:
    delayed_pool.run(check_split)


def check_benchmark(context: Context) -> None:
    device = torch.device(context.device, 0)
    groups = gpu.groups(device)
    calls = gpu.all_reduces(device, groups, 4096) | gpu.training_steps(device, groups, width=8)
    for call in calls.values():
        call()
    for call in gpu.chunk_sizes(device, [4096, 8192], 1 << 16).values():
        call()
    assert len(gpu.issues(device, groups, 4096)["hbm"]) == 20


def test_benchmark(delayed_pool: Pool) -> None:
    """Check that the calls timed by benchmarks.gpu work."""
    delayed_pool.run(check_benchmark)
