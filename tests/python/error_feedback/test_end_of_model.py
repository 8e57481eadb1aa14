"""A model with a communication hook, and the hook's state, end when the program drops them."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from harness import Context, Pool
from harness.hooks import hooked
from harness.layer_drop_ddp import wrapped
from torch import nn

pytestmark = pytest.mark.ranks(2)
LIMIT = 60  # seconds


def drop_model(context: Context, kind: str, steps: int) -> None:
    """If the first DDP lived on, its hooks would stay on the parameters, and the second DDP's
    backward() would fail."""
    inner = nn.Linear(80, 80)
    for _ in range(2):
        ddp = wrapped(inner)
        state = hooked(ddp, kind, ratio=0.5)
        for _ in range(steps):
            ddp(torch.ones(1, 80)).sum().backward()
        model, ended = weakref.ref(ddp), threading.Event()
        weakref.finalize(state, ended.set)
        del ddp, state
        gc.collect()
        assert model() is None
        # The thread that completed the last bucket may hold the state for a moment.
        assert ended.wait(LIMIT)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("kind", ["low_rank", "bytes", "blocks"])
def test_dropped_model_is_collected(pool: Pool, kind: str, steps: int) -> None:
    pool.run(drop_model, kind, steps)
