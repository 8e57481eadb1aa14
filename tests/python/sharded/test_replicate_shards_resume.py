"""Checkpoints of replicate_shards(): training continues alike, and with other replicas."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.layer_drop_ddp import gradients
from harness.sharded import (
    NODES,
    backward,
    gradients_of,
    mean_residuals,
    mesh_of,
    name_of,
    replicated,
)
from torch.distributed.device_mesh import init_device_mesh

pytestmark = [
    pytest.mark.ranks(2, 3, 4),
    pytest.mark.filterwarnings("ignore:layers that are always sent:RuntimeWarning"),
]

SETTINGS: dict[str, dict[str, Any]] = {
    "low_rank": {"ratio": 0.8},
    "bytes": {"ratio": 0.7, "min_numel": 64},
}


def resume(context: Context, kind: str) -> None:
    mesh = mesh_of(context)
    model, state = replicated(mesh, kind, **SETTINGS[kind])
    for step in range(7):
        backward(model, gradients(context.seed, context.rank, step, context.size))
    saved = copy.deepcopy(state.state_dict())
    again, other = replicated(mesh, kind, **SETTINGS[kind])
    other.load_state_dict(saved)
    for step in range(7, 14):
        own = gradients(context.seed, context.rank, step, context.size)
        backward(model, own)
        backward(again, own)
        for ours, theirs in zip(gradients_of(model), gradients_of(again), strict=True):
            assert_same(ours, theirs, f"step {step}")
    ours, theirs = state.summary(), other.summary()
    assert ours == theirs, (ours, theirs)


@pytest.mark.parametrize("kind", SETTINGS)
def test_resumed_training_continues_alike(pool: Pool, kind: str) -> None:
    pool.run(resume, kind)


def save(context: Context, kind: str) -> tuple[dict[str, Any], list[Any]]:
    """Train two shards on as many replicas as there are. Return the state, and the shard's sums of
    the residuals over the replicas."""
    mesh = mesh_of(context)
    model, state = replicated(mesh, kind, **SETTINGS[kind])
    for step in range(5):
        backward(model, gradients(context.seed, context.rank, step, context.size))
    sums = [one * mesh["nodes"].size() for one in mean_residuals(mesh, state, model)]
    return state.state_dict(), sums


@functools.cache
def saved_by(ranks: int, kind: str) -> list[tuple[dict[str, Any], list[Any]]]:
    former = Pool(ranks)
    try:
        return former.run(save, kind)
    finally:
        former.close()


def load(context: Context, kind: str, saved: list[tuple[dict[str, Any], list[Any]]]) -> None:
    """Load the states of 2 x 2 ranks into one replica of two shards."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("nodes", "shards"))
    model, state = replicated(mesh, kind, **SETTINGS[kind])
    states = [one for one, _ in saved]
    state.load_state_dict(states)
    shard = mesh["shards"].get_local_rank()
    expected = next(sums for one, sums in saved if one["shard"] == [shard, 2])
    for index, sum_of in enumerate(expected):
        residual = state.state_dict()["caches"].get(name_of(index))
        assert residual is not None or not sum_of.any()
        if residual is not None:
            assert_same(residual, sum_of, f"parameter {index}")
    backward(model, gradients(context.seed, context.rank, 9, context.size))
    assert state.summary()["steps"] == 6
    for given, complaint in (
        (states[0], "state is of rank 0 of 2, and this is rank 0 of 1" if shard == 0 else "of sh"),
        ([one for one in states if one["shard"][0] != shard], f"this rank has shard {shard}"),
        ([one | {"shard": [0, 3]} for one in states], "of 3 shards, and the model has 2"),
        ([{n: v for n, v in states[0].items() if n != "shard"}], "of an unsharded model"),
        ([], "no state at all"),
    ):
        with pytest.raises(ValueError, match=complaint):
            state.load_state_dict(given)
    assert state.summary()["steps"] == 6
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SETTINGS)
def test_resuming_with_fewer_replicas_keeps_the_sum(pool: Pool, kind: str) -> None:
    assert NODES[4] == 2
    pool.run(load, kind, saved_by(4, kind))
