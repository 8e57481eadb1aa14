"""low_rank_hook over many steps: all gradients arrive in the end, for a tenth of their bytes."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.hooks import low_rank
from harness.layer_drop_ddp import Weighted, wrapped
from harness.low_rank import backward

from torch_hbmcomm.low_rank.bucket_factors import BucketFactors
from torch_hbmcomm.low_rank.rule import LowRankRule

pytestmark = pytest.mark.ranks(4)

STEPS = 60
SHAPES = [(128, 64), (128,), (128, 128), (128,), (10, 128), (10,)]  # of a perceptron


class Outcome(NamedTuple):
    """Sums over all ranks and steps.

    lost: the largest share of a parameter's gradient that is neither sent nor in the residuals
    waiting: the largest share in the residuals
    sent: the share of the gradients' bytes
    """

    lost: float
    waiting: float
    sent: float


def gradients(context: Context, step: int) -> list[torch.Tensor]:
    """Return the same gradients in every run. A matrix is noise plus a fixed matrix of rank 8."""
    steady = torch.Generator().manual_seed(0)
    draw = torch.Generator().manual_seed(1000 * step + context.rank + 1)
    found = []
    for shape in SHAPES:
        whole = torch.randn(shape, generator=draw)
        if len(shape) > 1:
            left = torch.randn(shape[0], 8, generator=steady)
            whole += left @ torch.randn(8, shape[1], generator=steady) / 8**0.5
        found.append(whole)
    return found


def follow(context: Context) -> Outcome:
    model = Weighted(shapes=SHAPES)
    ddp = wrapped(model, bucket_cap_mb=0.05)
    state = low_rank(ddp)
    sent = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    computed = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(STEPS):
        own = gradients(context, step)
        for index, came in enumerate(backward(ddp, own)):
            computed[index] += own[index]
            sent[index] += came.double() * context.size
    lost, waiting = [], []
    residuals = state.state_dict()["caches"]
    for index, (gone, whole) in enumerate(zip(sent, computed, strict=True)):
        residual = residuals.get(f"all.{index}", torch.zeros(SHAPES[index]))
        both = torch.stack([residual.double(), whole])
        dist.all_reduce(both)
        lost.append(float((gone + both[0] - both[1]).norm() / both[1].norm()))
        waiting.append(float(both[0].norm() / both[1].norm()))
    counts = state.summary()
    return Outcome(max(lost), max(waiting), counts["sent_bytes"] / counts["gradient_bytes"])


def wait_for_ever(context: Context) -> Outcome:
    """Choose the rank 0 for every matrix's approximation, so that its gradients wait."""
    with mock.patch.object(LowRankRule, "rank", return_value=0):
        return follow(context)


def keep_what_was_sent(context: Context) -> Outcome:
    """Take nothing out of the residuals, so that gradients are sent again and again."""
    take_out = BucketFactors.take_out

    def copy_out(factors: BucketFactors, wire: torch.Tensor) -> None:
        names = [matrix.name for matrix in factors._matrices.values()]
        before = {name: factors._residuals.accumulated(name).clone() for name in names}
        take_out(factors, wire)
        for name, residual in before.items():
            factors._residuals.accumulated(name).copy_(residual)

    with mock.patch.object(BucketFactors, "take_out", copy_out):
        return follow(context)


def test_everything_arrives_for_a_tenth_of_the_bytes(pool: Pool) -> None:
    for outcome in pool.run(follow):
        assert outcome.lost < 1e-5
        assert outcome.waiting < 0.2
        assert outcome.sent < 0.11 + 1 / STEPS  # the first steps send a whole gradient more


def test_matrices_that_wait_for_ever_are_seen(pool: Pool) -> None:
    for outcome in pool.run(wait_for_ever):
        assert outcome.waiting > 0.9


def test_gradients_that_come_again_are_seen(pool: Pool) -> None:
    for outcome in pool.run(keep_what_was_sent):
        assert outcome.lost > 1
