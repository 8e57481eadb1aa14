"""FSDP2 within nodes, and compressed averages between them: results, residuals and replicas."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.hooks import hooked
from harness.layer_drop_ddp import SHAPES, Weighted, gradients, wrapped
from harness.sharded import (
    BLOCKS,
    Blocks,
    assert_replicas_equal,
    backward,
    gradients_of,
    mean_residuals,
    means,
    mesh_of,
    name_of,
    replicated,
    sharded,
    shards_of,
    values_of,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.tensors import local_part

pytestmark = [
    pytest.mark.ranks(2, 3, 4),
    pytest.mark.filterwarnings("ignore:layers that are always sent:RuntimeWarning"),
]

# Settings with which layer dropping drops shards of some hundred elements.
SMALL: dict[str, dict[str, Any]] = {
    "low_rank": {},
    "bytes": {"min_numel": 64, "every": 3},
    "paper": {"min_numel": 64, "every": 3},
}
KINDS = list(SMALL)


def own_gradients(context: Context, step: int) -> list[torch.Tensor]:
    return gradients(context.seed, context.rank, step, context.size)


def send_all(context: Context, kind: str) -> None:
    mesh = mesh_of(context)
    model, state = replicated(mesh, kind, ratio=0.0)
    for step in range(3):
        backward(model, own_gradients(context, step))
        expected = shards_of(mesh, means(context, step))
        for index, (found, mean) in enumerate(zip(gradients_of(model), expected, strict=True)):
            assert_same(found, mean, f"parameter {index} in step {step}")
    assert state.summary()["steps"] == 3
    assert state.summary()["cache_norm"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_without_compression_the_gradient_is_the_mean_over_all_ranks(pool: Pool, kind: str) -> None:
    pool.run(send_all, kind)


def conserve(context: Context, kind: str) -> None:
    mesh = mesh_of(context)
    model, state = replicated(mesh, kind, ratio=0.9, **SMALL[kind])
    applied = [torch.zeros_like(one) for one in values_of(model)]
    arrived = [torch.zeros_like(one) for one in applied]
    waited = 0.0
    for step in range(12):
        backward(model, own_gradients(context, step))
        for total, gradient in zip(applied, gradients_of(model), strict=True):
            total += gradient
        for total, mean in zip(arrived, shards_of(mesh, means(context, step)), strict=True):
            total += mean
        waited = max(waited, state.summary()["cache_norm"])
    waiting = mean_residuals(mesh, state, model)
    assert waited > 0
    for index, (sent, rest, total) in enumerate(zip(applied, waiting, arrived, strict=True)):
        if kind == "low_rank":
            torch.testing.assert_close(sent + rest, total, rtol=0, atol=1e-2)
        else:
            assert_same(sent + rest, total, f"parameter {index}")
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    before = values_of(model)
    state.drain(optimizer)
    assert state.summary()["cache_norm"] == 0
    for old, new, rest in zip(before, values_of(model), waiting, strict=True):
        torch.testing.assert_close(old - new, rest, rtol=1e-5, atol=1e-5)
    assert_replicas_equal(mesh, model)


@pytest.mark.parametrize("kind", KINDS)
def test_sent_gradients_and_residuals_add_up_to_all_gradients(pool: Pool, kind: str) -> None:
    pool.run(conserve, kind)


def train_replicas(context: Context, kind: str, optimizer: str) -> None:
    mesh = mesh_of(context)
    made = Blocks()
    for one in (*made.parameters(), *made.buffers()):
        one.data.fill_(1.0 + context.rank)
    model, state = replicated(mesh, kind, sharded(mesh, made), ratio=0.9, **SMALL[kind])
    first = float(mesh["shards"].get_local_rank())  # the node of rank 0 is the first replica
    assert_same(model.count, torch.tensor([1 + first]), "the buffer")
    for one in values_of(model):
        # FSDP cut the first replica's parameters, which each rank had filled by itself.
        assert_same(one, torch.full_like(one, 1 + first), "the parameter of the first replica")
    make: Any = {
        "AdamW": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    }[optimizer]
    stepping = make()
    for step in range(6):
        backward(model, own_gradients(context, step))
        stepping.step()
        assert_replicas_equal(mesh, model)
    counts = state.summary()
    assert counts["steps"] == 6
    assert counts["sent_bytes"] < 6 * counts["gradient_bytes"]


@pytest.mark.parametrize("optimizer", ["AdamW", "momentum"])
@pytest.mark.parametrize("kind", ["low_rank", "bytes"])
def test_replicas_have_equal_parameters_after_each_step(
    pool: Pool, kind: str, optimizer: str
) -> None:
    pool.run(train_replicas, kind, optimizer)


def compare_with_ddp(context: Context, kind: str) -> None:
    """Shard over one rank. Then the shards are DDP's parameters, and one bucket has them all."""
    mesh = init_device_mesh("cpu", (context.size, 1), mesh_dim_names=("nodes", "shards"))
    model = Weighted()
    fully_shard(model, mesh=mesh["shards"])
    _, state = replicated(mesh, kind, model, ratio=0.8)
    ddp = wrapped(Weighted(), bucket_cap_mb=25)
    other = hooked(ddp, kind, ratio=0.8)
    for step in range(10):
        own = own_gradients(context, step)
        backward(model, own)
        backward(ddp, own)
        for ours, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            torch.testing.assert_close(local_part(ours.grad), theirs.grad, rtol=1e-4, atol=1e-3)
    assert state.summary()["steps"] == other.summary()["steps"]
    assert state.summary()["sent_bytes"] == other.summary()["sent_bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_of_everything_is_sent_as_under_ddp(pool: Pool, kind: str) -> None:
    pool.run(compare_with_ddp, kind)


def accumulate(context: Context, reshard: bool) -> None:
    """Sum the gradients of several backward(), with and without their synchronization."""
    mesh = mesh_of(context)
    model = sharded(mesh, reshard_after_forward=reshard)
    _, state = replicated(mesh, "low_rank", model, ratio=0.0)
    expected = [torch.zeros_like(one) for one in values_of(model)]
    for step in range(4):
        model.set_is_last_backward(step % 2 == 1)
        model.set_requires_gradient_sync(step != 0)
        if step == 2:
            model.zero_grad()
            expected = [torch.zeros_like(one) for one in expected]
        model(*own_gradients(context, step)).backward()
        for total, mean in zip(expected, shards_of(mesh, means(context, step)), strict=True):
            total += mean
        if step > 0:
            for index, found in enumerate(gradients_of(model)):
                assert_same(found, expected[index], f"parameter {index} after step {step}")
    assert state.summary()["steps"] == 3


@pytest.mark.parametrize("reshard", [True, False])
def test_accumulated_gradients(pool: Pool, reshard: bool) -> None:
    pool.run(accumulate, reshard)


def skip_updates(context: Context) -> None:
    """Check that shards of which nothing was sent do not move, not even by weight decay."""
    mesh = mesh_of(context)
    made = Blocks()
    for parameter in made.parameters():
        parameter.data.fill_(1)
    model = sharded(mesh, made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.5)
    replicated(
        mesh, "bytes", model, fixed_threshold=1e30, max_age=99, min_numel=0, always_send=False
    )
    backward(model, own_gradients(context, 0))
    optimizer.step()
    for one in values_of(model):
        assert_same(one, torch.ones_like(one), "the shard")


def test_shards_that_wait_skip_the_step(pool: Pool) -> None:
    pool.run(skip_updates)


def overflow(context: Context) -> None:
    """One shard overflows, on one rank. All shards of all replicas undo the step."""
    mesh = mesh_of(context)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    model, state = replicated(mesh, "bytes", ratio=0.9, scaler=scaler, **SMALL["bytes"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    arrived = [torch.zeros_like(one) for one in values_of(model)]
    for step in range(8):
        own = own_gradients(context, step)
        if step == 5 and context.rank == context.size - 1:
            own[1][0] = torch.inf  # the first row, which shard 0 has
        optimizer.zero_grad()
        scaler.scale(model(*own)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 5:
            for total, mean in zip(arrived, shards_of(mesh, means(context, step)), strict=True):
                total += mean
        assert_replicas_equal(mesh, model)
    assert scaler.get_scale() == 2
    counts = state.summary()
    assert counts["refused_steps"] == 1
    assert counts["steps"] == 7
    state.drain(optimizer)
    for index, (value, total) in enumerate(zip(values_of(model), arrived, strict=True)):
        assert_same(value, -total + 0.0, f"parameter {index}")


def test_a_step_that_the_scaler_skips_is_undone_on_all_shards(pool: Pool) -> None:
    pool.run(overflow)


def break_gradient(context: Context, kind: str) -> None:
    mesh = mesh_of(context)
    model, _ = replicated(mesh, kind, ratio=0.9)
    has_row = mesh["shards"].get_local_rank() == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            own = own_gradients(context, step)
            if step == 2 and context.rank == 0:
                own[3][0] = torch.nan
            backward(model, own)
    named = [str(one.message) for one in caught if "is not finite" in str(one.message)]
    assert bool(named) == has_row
    assert all(f"gradient of {name_of(3)} is" in one for one in named)
    for index, found in enumerate(gradients_of(model)):
        assert bool(found.isnan().any()) == (has_row and index == 3)


@pytest.mark.parametrize("kind", ["low_rank", "bytes"])
def test_a_gradient_that_is_not_finite_arrives(pool: Pool, kind: str) -> None:
    pool.run(break_gradient, kind)


def train_narrow(context: Context) -> None:
    """Compute and reduce in bfloat16. Small whole numbers are exact in it."""
    mesh = mesh_of(context)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model, state = replicated(mesh, "bytes", sharded(mesh, mp_policy=policy), ratio=0.5, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    total = 0.0
    for step in range(6):
        value = float(context.size * (1 + step % 3))
        backward(model, [torch.full(shape, value) for shape in SHAPES])
        optimizer.step()
        total += value
    state.drain(optimizer)
    for one in values_of(model):
        assert_same(one, torch.full_like(one, -total), "the parameter")


def test_gradients_reduced_in_bfloat16(pool: Pool) -> None:
    pool.run(train_narrow)


def leave_unused(context: Context) -> None:
    mesh = mesh_of(context)
    model, _ = replicated(mesh, "low_rank", ratio=0.0)
    model.set_reduce_scatter_unused_params(True)
    own: list[Any] = own_gradients(context, 0)
    own[1] = None
    backward(model, own)
    expected = shards_of(mesh, means(context, 0))
    for index, found in enumerate(gradients_of(model)):
        wanted = torch.zeros_like(expected[1]) if index == 1 else expected[index]
        assert_same(found, wanted, f"parameter {index}")
    other, _ = replicated(mesh, "low_rank", ratio=0.0)
    with pytest.raises(ValueError, match=r"FSDP reduced \d+ elements of blocks\.1, which has"):
        backward(other, own)


@pytest.mark.skipif(
    not hasattr(nn.Module, "set_reduce_scatter_unused_params")
    and not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"),
    reason="PyTorch before 2.13",
)
def test_parameters_without_gradients(fresh_pool: Pool) -> None:
    fresh_pool.run(leave_unused)


def run_twice(context: Context, recompute: bool) -> None:
    """A block that runs twice in a forward() has the sum of both gradients.

    recompute: True: backward() computes each block's forward() again
    """
    mesh = mesh_of(context)
    model, state = replicated(mesh, "low_rank", ratio=0.0)
    own = own_gradients(context, 0)

    def twice(*weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), requires_grad=True)
        for index in (0, 0, 1, 2):
            total = run(model.blocks[index], total, *weights[index::BLOCKS])
        return total

    def run(block: Any, *arguments: Any) -> torch.Tensor:
        made: torch.Tensor = (
            checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
        )
        return made

    model.forward = twice
    for _ in range(2):
        backward(model, own)
        for index, mean in enumerate(shards_of(mesh, means(context, 0))):
            expected = mean * (2 if index % BLOCKS == 0 else 1)
            assert_same(gradients_of(model)[index], expected, f"parameter {index}")
    assert state.summary()["steps"] == 2


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_that_runs_twice(pool: Pool, recompute: bool) -> None:
    pool.run(run_twice, recompute)


def end_early(context: Context) -> None:
    """After a backward() that reduced some blocks only, the state says so."""
    mesh = mesh_of(context)
    model, state = replicated(mesh, "low_rank", ratio=0.0)
    own = own_gradients(context, 0)
    backward(model, own)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("a fault of the model")

    def failing(*weights: torch.Tensor) -> torch.Tensor:
        start = torch.zeros((), requires_grad=True)
        total: torch.Tensor = model.blocks[0](start, *weights[::BLOCKS])
        total.register_hook(fail)
        for index in (1, 2):
            total = model.blocks[index](total, *weights[index::BLOCKS])
        return total

    model.forward = failing
    with pytest.raises(KeyError, match="a fault of the model"):
        backward(model, own)
    with pytest.raises(RuntimeError, match=r"the last backward\(\) did not end"):
        state.summary()


def test_a_backward_that_does_not_end(fresh_pool: Pool) -> None:
    fresh_pool.run(end_early)


def divide(context: Context) -> None:
    """Let FSDP divide by 1, so that it adds the gradients of the shards."""
    mesh = mesh_of(context)
    model, _ = replicated(mesh, "low_rank", ratio=0.0)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)
    backward(model, own_gradients(context, 0))
    shards = mesh["shards"].size()
    for index, (found, mean) in enumerate(
        zip(gradients_of(model), shards_of(mesh, means(context, 0)), strict=True)
    ):
        assert_same(found, mean * shards, f"parameter {index}")
    dist.barrier()


def test_another_divisor(pool: Pool) -> None:
    pool.run(divide)


def ignore(context: Context) -> None:
    mesh = mesh_of(context)
    model = sharded(mesh)
    state = hbmcomm.replicate_shards(model, replicas=mesh.get_group("nodes"))
    assert state.summary()["steps"] == 0
    assert "low_rank" in state.state_dict()["hook"]


def test_the_default_configuration_is_low_rank(pool: Pool) -> None:
    pool.run(ignore)
