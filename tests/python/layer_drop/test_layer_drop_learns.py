"""The default trains: handwritten digits, by four ranks that send a tenth of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from harness import Context, Pool
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.layer_drop.bucket_factors import BucketFactors
from torch_hbmcomm.layer_drop.low_rank import LowRankRule

pytestmark = pytest.mark.ranks(4)

STEPS, BATCH, TESTED = 120, 16, 360
LOST = 2.0  # points of accuracy; over five seeds it lost 1.1 at most, and 0.5 on average
BROKEN = 5.0  # and what a broken rule loses at least


def learn(context: Context, hooked: bool) -> float:
    """Return the accuracy on test images, in %."""
    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 8 - 1
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    state = hbmcomm.LayerDropState(model=ddp)
    if hooked:
        ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
    draw = torch.Generator().manual_seed(1 + context.rank)
    for _ in range(STEPS):
        batch = torch.randint(TESTED, len(labels), (BATCH,), generator=draw)
        optimizer.zero_grad()
        cross_entropy(ddp(images[batch]), labels[batch]).backward()
        optimizer.step()
    if hooked:
        counts = state.summary()
        assert counts["sent_bytes"] < (0.11 + 1 / STEPS) * counts["gradient_bytes"]
    found = model(images[:TESTED]).argmax(1)
    return 100 * float((found == labels[:TESTED]).float().mean())


def wait_for_ever(context: Context) -> float:
    """Every matrix at rank 0."""
    with mock.patch.object(LowRankRule, "rank", return_value=0):
        return learn(context, hooked=True)


def keep_what_was_sent(context: Context) -> float:
    """Caches from which nothing is taken, so that gradients come again and again."""
    take_out = BucketFactors.take_out

    def copy_out(factors: BucketFactors, wire: torch.Tensor) -> None:
        names = [matrix.name for matrix in factors._matrices.values()]
        before = {name: factors._cache.accumulated(name).clone() for name in names}
        take_out(factors, wire)
        for name, cache in before.items():
            factors._cache.accumulated(name).copy_(cache)

    with mock.patch.object(BucketFactors, "take_out", copy_out):
        return learn(context, hooked=True)


def test_the_default_learns(pool: Pool) -> None:
    plain = min(pool.run(learn, False))
    assert min(pool.run(learn, True)) > plain - LOST


@pytest.mark.parametrize("broken", [wait_for_ever, keep_what_was_sent])
def test_a_broken_rule_does_not(pool: Pool, broken: Callable[[Context], float]) -> None:
    plain = min(pool.run(learn, False))
    assert max(pool.run(broken)) < plain - BROKEN
