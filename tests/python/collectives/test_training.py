"""Training as users write it, over the backend under test and over Gloo: the same numbers.

Each function trains over a group and returns tensors. The two runs must agree to rounding, because
the backends reduce in different orders. Replicated tensors must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import assert_same, gathered
from harness.training import (
    STEPS,
    WIDTH,
    batch,
    collectives,
    loss_of,
    mesh_of,
    net,
    sharded,
    train,
    weights,
    whole,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.ranks(1, 2, 4)

Train = Callable[[Context, dist.ProcessGroup], list[torch.Tensor]]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def assert_close(mine: torch.Tensor, other: torch.Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        mine, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def assert_replicated(context: Context, tensors: list[torch.Tensor]) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    for rank, other in enumerate(gathered(context, flat)):
        assert_same(other, flat, f"rank {rank} against rank {context.rank}")


def check(context: Context, function: Train, tolerance: float) -> list[torch.Tensor]:
    """Check that both runs agree. Returns the results of the backend under test."""
    ours = function(context, world())
    assert context.gloo is not None
    theirs = function(context, context.gloo)
    assert ours and len(ours) == len(theirs)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(mine, other, tolerance, f"tensor {index} of {function.__name__}")
    return ours


def check_replicas(context: Context, function: Train, tolerance: float) -> None:
    assert_replicated(context, check(context, function, tolerance))


# DistributedDataParallel.


def ddp(group: dist.ProcessGroup, model: nn.Module | None = None, **options: Any) -> Any:
    # The bucket size keeps several buckets in flight.
    options.setdefault("bucket_cap_mb", 0.02)
    return DistributedDataParallel(model or net(), process_group=group, **options)


def plain(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    return train(ddp(group), context)


def one_bucket(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    return train(ddp(group, bucket_cap_mb=25), context)


def unused_parameters(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    return train(ddp(group, net(sometimes=True), find_unused_parameters=True), context)


def static_graph(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    return train(ddp(group, static_graph=True), context)


def bucket_views(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    model = ddp(group, gradient_as_bucket_view=True)
    result = train(model, context)
    gradients = [parameter.grad for parameter in model.parameters()]
    del model
    return result + [gradient.clone() for gradient in gradients if gradient is not None]


def no_sync(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    model = ddp(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        with model.no_sync():
            loss_of(model, context, 2 * step).backward()
        loss_of(model, context, 2 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def join(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Train with unequal numbers of batches on the ranks."""
    model = ddp(group)
    with model.join():
        train(model, context, steps=STEPS + context.rank)
    return weights(model)


def buffers(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Train a model with buffers, which DDP broadcasts from rank 0 before each step."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    replicas = ddp(group, model)
    result = train(replicas, context)
    replicas.eval()
    replicas(batch(context, 0)[0])
    return result


def bf16_compress(state, bucket):  # type: ignore[no-untyped-def]
    """Call bf16_compress_hook: without a GPU, DDP refuses a hook with that name.

    This function has no annotations, because DDP also refuses annotations that are strings.
    """
    return default_hooks.bf16_compress_hook(state, bucket)


def bf16_hook(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    model = ddp(group)
    model.register_comm_hook(group, bf16_compress)
    return train(model, context)


def fp16_hook(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    model = ddp(group)
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return train(model, context)


def bf16_model(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return train(ddp(group), context)


@pytest.mark.parametrize(
    ("function", "tolerance"),
    [
        (plain, 1e-5),
        (one_bucket, 1e-5),
        (unused_parameters, 1e-5),
        (static_graph, 1e-5),
        (bucket_views, 1e-5),
        (no_sync, 1e-5),
        (join, 1e-5),
        (buffers, 1e-4),
        (bf16_hook, 2e-2),
        (fp16_hook, 2e-3),
        (bf16_model, 2e-2),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_ddp(pool: Pool, function: Train, tolerance: float) -> None:
    pool.run(check_replicas, function, tolerance)


def power_sgd(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Train with one bucket: of several, ranks would start second stages in different orders."""
    model = ddp(group, bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(
        process_group=group, matrix_approximation_rank=2, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, context)


def check_power_sgd(context: Context) -> None:
    """Compare two runs of PowerSGD, which starts its second stage in a callback of its first.

    Gloo does not survive such a callback, so there is no reference run.
    """
    first, second = power_sgd(context, world()), power_sgd(context, world())
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        assert_same(one, other, f"parameter {index} in a second run")
    assert_replicated(context, first)


@beyond_gloo
def test_power_sgd(pool: Pool) -> None:
    for _ in range(5):
        pool.run(check_power_sgd)


# FSDP2.


def fsdp_fp32(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    return whole(train(sharded(group, net()), context))


def fsdp_bf16(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return whole(train(sharded(group, net(), mp_policy=policy), context))


def fsdp_bf16_reduce(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return whole(train(sharded(group, net(), mp_policy=policy), context))


def fsdp_divide_factor(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Use a divide factor other than the world size: FSDP2 then uses PREMUL_SUM if it can."""
    model = sharded(group, net())
    assert isinstance(model, FSDPModule)
    model.set_gradient_divide_factor(3.0)
    return whole(train(model, context))


def fsdp_odd_shapes(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Shard parameters whose rows do not divide evenly by the ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3), nn.Linear(3, WIDTH))
    return whole(train(sharded(group, model), context))


@pytest.mark.parametrize(
    ("function", "tolerance"),
    [
        (fsdp_fp32, 1e-5),
        (fsdp_bf16, 2e-2),
        (fsdp_bf16_reduce, 2e-2),
        (fsdp_divide_factor, 1e-5),
        (fsdp_odd_shapes, 1e-5),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_fsdp(pool: Pool, function: Train, tolerance: float) -> None:
    pool.run(check_replicas, function, tolerance)


def fsdp_allocated(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    model = sharded(group, net())
    if group is not context.gloo:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
    return whole(train(model, context))


@beyond_gloo
def test_fsdp_buffers_from_the_group(pool: Pool) -> None:
    pool.run(check_replicas, fsdp_allocated, 1e-5)


# DTensor and tensor parallelism.


def redistribute(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    mesh = mesh_of(group)
    generator = torch.Generator().manual_seed(context.seed)
    results = []
    for shape in [(8, 12), (7, 5)]:  # (7, 5): uneven shards
        value = torch.randn(shape, generator=generator)
        rows = distribute_tensor(value, mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        results += [columns.to_local(), columns.redistribute(mesh, [Replicate()]).to_local()]
        partial = DTensor.from_local(value + context.rank, mesh, [Partial()], run_check=False)
        results += [
            partial.redistribute(mesh, [Replicate()]).to_local(),
            partial.redistribute(mesh, [Shard(0)]).to_local(),
        ]
        results += whole([rows @ rows.t()])
    return results


def tensor_parallel(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    plan = {
        "first": ColwiseParallel(),
        "second": RowwiseParallel(),
        "third": ColwiseParallel(output_layouts=Replicate()),
    }
    model = parallelize_module(net(), mesh_of(group), plan)
    same_data = Context(0, context.size, None, context.folder, context.seed)
    return whole(train(model, same_data))


@pytest.mark.parametrize("function", [redistribute, tensor_parallel], ids=lambda f: f.__name__)
def test_dtensor(pool: Pool, function: Train) -> None:
    pool.run(check, function, 1e-5)


# Functional collectives, eager and compiled.


def eager(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    return [value.clone() for value in collectives(batch(context, 0)[0], group)]


def compiled(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    torch._dynamo.reset()
    function = torch.compile(collectives, backend="aot_eager", fullgraph=True)
    return [value.clone() for value in function(batch(context, 0)[0], group)]


def compiled_ddp(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model = torch.compile(ddp(group, bucket_cap_mb=25), backend="aot_eager")
    return train(model, context)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function",
    [eager, compiled, pytest.param(compiled_ddp, marks=pytest.mark.full)],
    ids=lambda f: f.__name__,
)
def test_functional_collectives(pool: Pool, function: Train) -> None:
    pool.run(check, function, 1e-5, limit=120)


def inductor(context: Context, group: dist.ProcessGroup) -> list[torch.Tensor]:
    torch._dynamo.reset()
    function = torch.compile(collectives, fullgraph=True)
    return [value.clone() for value in function(batch(context, 0)[0], group)]


@pytest.mark.full
@pytest.mark.ranks(2)
def test_inductor(pool: Pool) -> None:
    pool.run(check, inductor, 1e-5, limit=180)
