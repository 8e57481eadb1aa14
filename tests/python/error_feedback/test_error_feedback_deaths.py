"""A rank dies while a hook averages: every other rank has an error, and can leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import beyond_gloo
from harness.deaths import Fate, Job, report
from harness.hooks import hooked
from harness.layer_drop_ddp import wrapped
from torch import nn

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

WAYS: dict[str, dict[str, Any]] = {
    "low rank": {"kind": "low_rank", "ratio": 0.5},
    "low rank that measures": {"kind": "low_rank", "ratio": "auto"},
    "layers": {"kind": "bytes", "ratio": 0.5},
    "blocks": {"kind": "blocks", "ratio": 0.5},
    "blocks of whole numbers": {"kind": "blocks", "ratio": 0.5, "levels": 1},
    "blocks that measure": {"kind": "blocks", "ratio": "auto", "levels": 1},
}
_TRAININGS: dict[str, Any] = {}


class Steps:
    """Trains one step in each call. The first call of a process makes the model."""

    def __init__(self, way: str) -> None:
        self._way = way

    def __call__(self, rank: int, size: int) -> None:
        if not _TRAININGS:
            ddp = wrapped(nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)))
            state = hooked(ddp, **WAYS[self._way])
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
            _TRAININGS.update(ddp=ddp, state=state, optimizer=optimizer)
        _TRAININGS["optimizer"].zero_grad()
        _TRAININGS["ddp"](torch.ones(1, 80)).sum().backward()
        _TRAININGS["optimizer"].step()


@pytest.mark.parametrize("turn", [2, 12])
@pytest.mark.parametrize("way", WAYS)
def test_a_dead_rank(way: str, turn: int) -> None:
    survivors = Job(3).run(Steps(way), Fate(1, turn=turn))
    report(survivors)
    for survivor in survivors:
        assert "rank 1" in survivor.text and "has died" in survivor.text
