"""low_rank_hook: sends low-rank approximations of the residuals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.hooks import low_rank
from harness.layer_drop_ddp import SHAPES, Weighted, residuals_of, wrapped
from harness.low_rank import (
    MATRICES,
    PowerSgd,
    assert_near,
    backward,
    normal,
    ranks_now,
    started,
    wide_normal,
)
from harness.pairwise import in_turn

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.low_rank.ranks import Matrix
from torch_hbmcomm.low_rank.rule import LowRankRule

pytestmark = pytest.mark.ranks(1, 2, 4)

STEPS = 14
RATIOS = [0.5, 0.7, 0.8]
RELAXATIONS = {0.5: 1.0, 0.7: 1.9, 0.8: 1.2}
WAYS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 25},
    {"static_graph": True},
]


def follow(context: Context, ratio: float, way: Any, backend: str) -> None:
    """Compare with the reference, in float64 because nearly dependent columns amplify rounding."""
    relaxation = RELAXATIONS[ratio]
    ddp, state = started(context, way, backend, torch.float64, ratio=ratio, relaxation=relaxation)
    reference = PowerSgd(relaxation)
    for step in range(STEPS):
        of_ranks = [wide_normal(context, rank, step) for rank in range(context.size)]
        found = backward(ddp, of_ranks[context.rank])
        ranks = ranks_now(state)
        assert step > 0 or all(ranks.values()), "the first step approximates, too"
        expected = reference.step(of_ranks, ranks, MATRICES)
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_near(ours, theirs, f"step {step}, parameter {index}")
            of_all = [torch.empty_like(ours) for _ in range(context.size)]
            dist.all_gather(of_all, ours)
            for other in of_all:
                assert_same(other, ours, f"step {step}, parameter {index} on another rank")
    for index, (ours, theirs) in enumerate(
        zip(residuals_of(state), reference.residuals[context.rank], strict=True)
    ):
        assert_near(ours, theirs, f"the residual of parameter {index}")
    assert len(set(ranks.values())) > 1, "ranks follow the energy"


@pytest.mark.parametrize("ratio", RATIOS)
def test_approximations_are_power_sgds(pool: Pool, ratio: float) -> None:
    number = RATIOS.index(ratio)
    backend = in_turn(["hbm", "gloo"], number, pool.size)
    pool.run(follow, ratio, in_turn(WAYS, number, pool.size), backend)


def stand_for_all(context: Context) -> None:
    """Compare all ranks with one rank that has the average of all ranks' gradients."""
    ddp, state = started(context, dtype=torch.float64, ratio=0.8)
    groups = [dist.new_group([rank]) for rank in range(context.size)]
    alone = wrapped(Weighted(torch.float64), process_group=groups[context.rank])
    other = low_rank(alone, ratio=0.8)
    for step in range(STEPS):
        of_ranks = [wide_normal(context, rank, step) for rank in range(context.size)]
        mean = [torch.stack(parts).mean(0) for parts in zip(*of_ranks, strict=True)]
        found, expected = backward(ddp, of_ranks[context.rank]), backward(alone, mean)
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_near(ours, theirs, f"step {step}, parameter {index}")
    assert state.summary()["sent_bytes"] == other.summary()["sent_bytes"]


@pytest.mark.ranks(4)
def test_one_rank_stands_for_all(pool: Pool) -> None:
    """papers/layer_drop/accuracy.py relies on this: one process stands for all ranks there."""
    pool.run(stand_for_all)


def keep_everything(context: Context, options: Any) -> None:
    """Check that sent gradients and residuals add up to all gradients, up to rounding."""
    ddp, state = started(context, ratio=0.8, **options)
    sent = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    computed = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    rounded = torch.zeros(len(SHAPES), dtype=torch.float64)
    for step in range(STEPS):
        own = normal(context, context.rank, step)
        for index, came in enumerate(backward(ddp, own)):
            computed[index] += own[index]
            sent[index] += came.double() * context.size
            rounded[index] += 2e-7 * own[index].norm()
            if "wire_dtype" in options:  # residuals keep a rank's rounding, but not the sum's
                half = torch.finfo(torch.bfloat16).eps / 2  # of a unit: the error of one rounding
                rounded[index] += came.norm() * (context.size - 1) * half
    dist.all_reduce(rounded)
    for index, (residual, gone, whole) in enumerate(
        zip(residuals_of(state), sent, computed, strict=True)
    ):
        both = torch.stack([residual.double(), whole])
        dist.all_reduce(both)
        assert (gone + both[0] - both[1]).norm() <= rounded[index], f"parameter {index}"


@pytest.mark.parametrize("options", [{}, {"wire_dtype": torch.bfloat16}, {"warmup": 5}])
def test_nothing_is_lost_by_approximating(pool: Pool, options: Any) -> None:
    pool.run(keep_everything, options)


def send_everything(context: Context, options: Any) -> None:
    """The results are gradients rounded to bfloat16, not approximations."""
    ddp, state = started(context, wire_dtype=torch.bfloat16, **options)
    for step in range(STEPS):
        of_ranks = [normal(context, rank, step) for rank in range(context.size)]
        found = backward(ddp, of_ranks[context.rank])
        for index, parts in enumerate(zip(*of_ranks, strict=True)):
            mean = torch.stack(parts).double().mean(0)
            if mean.numel() > 1:
                assert (found[index] - mean).norm() < 0.02 * mean.norm(), f"parameter {index}"
    assert state.summary()["waiting"] == 0


@pytest.mark.parametrize("options", [{"ratio": 0}, {"ratio": 0.8, "warmup": STEPS}])
def test_nothing_is_approximated_where_everything_is_sent(pool: Pool, options: Any) -> None:
    pool.run(send_everything, options)


def leave_unused(context: Context) -> None:
    """Check that an unused matrix keeps its residual, and a matrix used by rank 0 is averaged."""
    ddp, state = started(context, {"find_unused_parameters": True}, ratio=0.8)
    applied, total = torch.zeros(SHAPES[3]), torch.zeros(SHAPES[3])
    for step in range(STEPS):
        weights: list[torch.Tensor | None] = [*normal(context, context.rank, step)]
        if step % 3 == 2 or (step % 3 == 1 and context.rank > 0):
            weights[3] = None
        ddp.zero_grad()
        ddp(*weights).backward()
        came = ddp.module.all[3].grad
        assert (came is None) == (step % 3 == 2)
        if came is not None:
            applied += came * context.size
        if weights[3] is not None:
            total += weights[3]
    total += 0
    held = residuals_of(state)[3] - total
    dist.all_reduce(held)
    assert_near(applied, -held.double(), "sent and residual")


def test_unused_matrices_keep_their_residuals(pool: Pool) -> None:
    pool.run(leave_unused)


def scale_losses(context: Context) -> None:
    """Check that steps that the scaler skips have no effect."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=100)
    one_bucket = {"bucket_cap_mb": 25}  # the first ranks depend on buckets, which DDP changes
    ddp, state = started(context, one_bucket, ratio=0.8, scaler=scaler)
    plain, other = started(context, one_bucket, ratio=0.8)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
    reference = torch.optim.SGD(plain.parameters(), lr=1)
    for step in range(STEPS):
        own = normal(context, context.rank, step)
        broken = step in (0, 2, 7)  # step 0 too, which chooses ranks
        if broken and context.rank == step % context.size:
            own[3][0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(ddp(*own)).backward()
        scaler.step(optimizer)
        scaler.update()
        if not broken:
            backward(plain, own)
            reference.step()
    assert state.summary()["refused_steps"] == 3
    for index, (ours, theirs) in enumerate(zip(ddp.parameters(), plain.parameters(), strict=True)):
        assert_near(ours.detach(), theirs.detach().double(), f"parameter {index}")
    assert state.state_dict()["rule"]["ranks"] == other.state_dict()["rule"]["ranks"]


@pytest.mark.ranks(1, 2)
def test_skipped_steps_leave_no_trace_in_factors(pool: Pool) -> None:
    pool.run(scale_losses)


def resume(context: Context) -> None:
    ddp, state = started(context, ratio=0.8)
    for step in range(8):
        backward(ddp, normal(context, context.rank, step))
    saved = copy.deepcopy(state.state_dict())
    again, other = started(context, {"bucket_cap_mb": 25}, ratio=0.8)
    other.load_state_dict(saved)
    for step in range(8, 20):
        own = normal(context, context.rank, step)
        for ours, theirs in zip(backward(ddp, own), backward(again, own), strict=True):
            assert_same(ours, theirs, f"step {step}")
    assert state.summary() == other.summary()


def test_resumed_training_continues_with_equal_factors(pool: Pool) -> None:
    pool.run(resume)


def approximate_more(context: Context) -> None:
    """Load a checkpoint of a larger min_numel: matrices that were sent whole now get a rank."""
    small = 2  # the only matrix of fewer than 4096 elements
    ddp, state = started(context, ratio=0.7, min_numel=4096)
    for step in range(8):
        backward(ddp, normal(context, context.rank, step))
    again, other = started(context, ratio=0.7)
    other.load_state_dict(state.state_dict())
    total, came = torch.zeros(SHAPES[small]), torch.zeros(SHAPES[small], dtype=torch.float64)
    for step in range(8, 24):
        own = normal(context, context.rank, step)
        total += own[small]
        came += backward(again, own)[small].double() * context.size
    assert other.state_dict()["rule"]["ranks"][f"all.{small}"] > 0
    rest = total - residuals_of(other)[small]
    dist.all_reduce(rest)
    assert rest.any()
    assert_near(came.float(), rest.double(), "what came")


def test_a_checkpoint_that_sent_matrices_whole(pool: Pool) -> None:
    pool.run(approximate_more)


def test_factors_whose_squares_are_no_numbers_are_kept() -> None:
    rule = LowRankRule(hbmcomm.LowRank(ratio=0.9))
    rule.keep([Matrix("weight", 30, 20, 8)], [torch.full((2, 20), 1e200, dtype=torch.float64)])
    rule.end_step()
    assert rule.state_dict()["rights"]["weight"].max() == 1e200
