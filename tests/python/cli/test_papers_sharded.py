"""papers.layer_drop.sharded: a task learned by FSDP2, with replicas of the shards."""

from __future__ import annotations

import math

import pytest
from harness import Context, Pool
from harness.sharded import mesh_of

import torch_hbmcomm as hbmcomm
from papers.layer_drop.sharded import CONTENDERS, learn
from papers.layer_drop.tasks import Residuals

pytestmark = [
    pytest.mark.ranks(2, 4),
    pytest.mark.filterwarnings("ignore:layers that are always sent:RuntimeWarning"),
]


def train(context: Context) -> None:
    mesh, task = mesh_of(context), Residuals()
    plain = learn(task, mesh, "SGD", hbmcomm.LowRank(ratio=0), 0, 4)
    assert plain.share == 1
    assert math.isfinite(*plain.quality)
    for contender in CONTENDERS.values():
        found = learn(task, mesh, "SGD", contender(0.5), 0, 4)
        assert 0 < found.share < 1.1
        assert math.isfinite(*found.quality)


def test_a_task_of_each_contender(pool: Pool) -> None:
    pool.run(train)
