"""A rank dies while shards are averaged: every other rank has an error, and can leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import beyond_gloo
from harness.deaths import Fate, Job, report
from harness.layer_drop_ddp import SHAPES
from harness.sharded import backward, replicated, sharded
from torch.distributed.device_mesh import init_device_mesh

pytestmark = [
    beyond_gloo,
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:layers that are always sent:RuntimeWarning"),
]

_TRAINING: list[Any] = []


def step(rank: int, size: int) -> None:
    """Train one step. The first call makes the model."""
    if not _TRAINING:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "shards"))
        model, state = replicated(mesh, "low_rank", sharded(mesh), ratio=0.8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _TRAINING.append((model, state, optimizer))
    model, _, optimizer = _TRAINING[0]
    backward(model, [torch.ones(shape) for shape in SHAPES])
    optimizer.step()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_dead_replica(victim: int) -> None:
    survivors = Job(4).run(step, Fate(victim))
    report(survivors)
    assert len(survivors) == 3
    # A rank without a group in common with the victim sees only that another survivor has left.
    assert {survivor.kind for survivor in survivors} == {"DistBackendError"}
    assert any("has died" in survivor.text for survivor in survivors)
