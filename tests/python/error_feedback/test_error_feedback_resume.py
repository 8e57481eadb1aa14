"""Checkpoints of DDP hooks: resumed training continues alike, also on another number of ranks."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.layer_drop_ddp import (
    SHAPES,
    Weighted,
    backward,
    gradients,
    residuals_of,
    started,
    wrapped,
)

import torch_hbmcomm as hbmcomm

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def resume(context: Context) -> None:
    options: Any = {"ratio": 0.7, "max_age": 6, "every": 4}
    ddp, state = started(**options)
    for step in range(9):
        backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
    saved = copy.deepcopy(state.state_dict())
    again, other = started(ddp_options={"bucket_cap_mb": 25}, **options)
    other.load_state_dict(saved)
    for step in range(9, 20):
        own = gradients(context.seed, context.rank, step, context.size)
        for ours, theirs in zip(backward(ddp, [*own]), backward(again, [*own]), strict=True):
            assert ours is not None and theirs is not None
            assert_same(ours, theirs, f"step {step}")
    assert state.summary() == other.summary()


def test_resumed_training_continues_alike(pool: Pool) -> None:
    pool.run(resume)


def resume_elsewhere(context: Context, states: list[dict[str, Any]], sums: list[Any]) -> None:
    _, state = started(ratio=0.7)
    state.load_state_dict(states)
    for index, (residual, expected) in enumerate(zip(residuals_of(state), sums, strict=True)):
        dist.all_reduce(residual)
        assert_same(residual, expected, f"the sum of the residuals of parameter {index}")
    assert state.summary()["steps"] == states[0]["statistics"]["steps"]


def saved_states(context: Context) -> tuple[dict[str, Any], list[torch.Tensor]]:
    ddp, state = started(ratio=0.7)
    for step in range(7):
        backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
    sums = residuals_of(state)
    for residual in sums:
        dist.all_reduce(residual)
    return state.state_dict(), sums


@functools.cache
def saved_by(ranks: int) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Return the states of `ranks` ranks, and the sums of their residuals."""
    former = Pool(ranks)
    try:
        found = former.run(saved_states)
    finally:
        former.close()
    return [state for state, _ in found], found[0][1]


@pytest.mark.parametrize("before", [1, 2, 5])
def test_resuming_with_other_ranks_keeps_the_sum(pool: Pool, before: int) -> None:
    pool.run(resume_elsewhere, *saved_by(before))


def resume_without_compiling(context: Context) -> None:
    """Load a compiled model's checkpoint: torch.compile in DDP puts a prefix before every name."""
    compiled: Any = torch.compile(Weighted(), backend="eager")
    saved = hbmcomm.LayerDropState(wrapped(compiled)).state_dict()
    assert saved["names"] == [f"all.{index}" for index in range(len(SHAPES))]
    _, state = started()
    state.load_state_dict(saved | {"caches": {"all.0": torch.ones(7)}})
    assert_same(residuals_of(state)[0], torch.ones(7), "the residual")


@pytest.mark.ranks(1, 2)
def test_a_checkpoint_of_a_compiled_model(pool: Pool) -> None:
    pool.run(resume_without_compiling)
