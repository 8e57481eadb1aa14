"""The factors of one bucket, without a hook: results and residuals add up to the gradient.

The tests have every type of gradients, wire and residuals.
"""

from __future__ import annotations

import math

import pytest
import torch

from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.layers import Shape
from torch_hbmcomm.error_feedback.residuals import Residuals
from torch_hbmcomm.low_rank.bucket_factors import BucketFactors
from torch_hbmcomm.low_rank.config import LowRank
from torch_hbmcomm.low_rank.rule import LowRankRule

SHAPES = {"kernels": (32, 16, 3, 3), "one": (64, 48), "other": (40, 300)}
RANKS = {"kernels": 5, "one": 4, "other": 1}
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("relaxation", [1.0, 1.2])
@pytest.mark.parametrize("recoverable", [False, True])
@pytest.mark.parametrize(
    ("gradients", "wire", "residual"),
    [
        *((FP32, FP32, None), (FP32, FP32, BF16), (FP32, BF16, None), (FP32, BF16, BF16)),
        *((BF16, BF16, None), (BF16, BF16, BF16), (FP16, FP16, None), (FP64, FP64, None)),
    ],
)
def test_nothing_is_lost(
    gradients: torch.dtype,
    wire: torch.dtype,
    residual: torch.dtype | None,
    recoverable: bool,
    relaxation: float,
) -> None:
    rule = LowRankRule(LowRank(ratio=0.8, relaxation=relaxation))
    rule.load_state_dict(rule.state_dict() | {"ranks": RANKS})
    counts = [math.prod(shape) for shape in SHAPES.values()]
    layers = BucketLayers(
        shapes=tuple(
            Shape(name, len(shape), math.prod(shape), wire.itemsize, shape)
            for name, shape in SHAPES.items()
        ),
        begins=(0, counts[0], counts[0] + counts[1]),
        layers=(),
        wire=wire,
        device=torch.device("cpu"),
    )
    residuals = Residuals(residual, recoverable)
    buffer = torch.randn(sum(counts)).to(gradients)
    given = buffer.double().clone()
    residuals.accumulate(list(SHAPES), buffer.split(counts))
    factors = BucketFactors(rule, layers, residuals, factor=0.5)
    factors.choose(range(len(SHAPES)))
    assert len(factors.parameters) == len(SHAPES)
    packed = torch.empty(factors.numel, dtype=wire)
    factors.take_out(packed)
    assert factors.restore(packed, buffer, scale=0.5)
    came = buffer.double() / 0.5
    kept = torch.cat([residuals.accumulated(name).double() for name in SHAPES])
    bound = max(torch.finfo(dtype).eps for dtype in (gradients, wire, residual or gradients))
    for one, other in zip((came + kept).split(counts), given.split(counts), strict=True):
        assert (one - other).norm() < 2 * bound * other.norm()
    assert (came.norm() > 0.2 * given.norm()) and (kept.norm() > 0.2 * given.norm())
