"""Adam's second moment when the gradients of several steps arrive together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Context, Pool
from harness.hooks import low_rank
from harness.layer_drop_ddp import Weighted, wrapped

from torch_hbmcomm.low_rank.measures import SKETCHED, Measures
from torch_hbmcomm.low_rank.optimizer import SecondMomentCorrector

pytestmark = pytest.mark.ranks(1, 2, 4)

SHAPES = [*[(32, 48)] * 8, (48,)]  # eight matrices: errors in their measured sizes average out
STEPS = 60
SEED = 1  # fixes the gradients; the hook's own random numbers have fixed seeds

KINDS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def stepped(kind: dict[str, Any]) -> tuple[torch.optim.Adam, torch.nn.Parameter]:
    """Return an optimizer that has taken a step, and so has state."""
    weight = torch.nn.Parameter(torch.zeros(6, 5))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.75), **kind)
    weight.grad = torch.full((6, 5), 2.0)
    optimizer.step()
    return optimizer, weight


@pytest.mark.parametrize("kind", KINDS, ids=["single", "foreach", "fused"])
def test_a_part_of_the_square_counts_once(kind: dict[str, Any]) -> None:
    optimizer, weight = stepped(kind)
    expected = optimizer.state[weight]["exp_avg_sq"].clone()
    corrector = SecondMomentCorrector()
    corrector.add(weight, 0.5)
    for part in (0.5, 1.0):
        weight.grad = torch.rand(6, 5)
        expected = 0.75 * expected + 0.25 * part * weight.grad**2
        optimizer.step()
        torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], expected)


@pytest.mark.parametrize("gradient", [1e-22, 1e-20, 3.0, 1e6])
def test_a_second_moment_is_never_negative(gradient: float) -> None:
    """Adam takes the square root of the second moment, so the moment must not be negative."""
    optimizer, weight = stepped({"foreach": False})
    optimizer.state[weight]["exp_avg_sq"].zero_()
    corrector = SecondMomentCorrector()
    corrector.add(weight, 0.01)
    weight.grad = torch.full((6, 5), gradient)
    optimizer.step()
    assert (optimizer.state[weight]["exp_avg_sq"] >= 0).all()
    assert weight.isfinite().all()


def test_gradients_that_a_scaler_has_scaled_count_unscaled() -> None:
    """A fused optimizer unscales the gradients itself."""
    optimizer, weight = stepped({"fused": True})
    expected = optimizer.state[weight]["exp_avg_sq"].clone()
    corrector = SecondMomentCorrector()
    corrector.add(weight, 0.5)
    optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    weight.grad = torch.full((6, 5), 8.0)
    optimizer.step()
    expected = 0.75 * expected + 0.25 * 0.5
    torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], expected)


def test_a_step_that_a_scaler_skips_changes_nothing() -> None:
    optimizer, weight = stepped({"fused": True})
    before = optimizer.state[weight]["exp_avg_sq"].clone()
    corrector = SecondMomentCorrector()
    corrector.add(weight, 0.5)
    optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], before, rtol=0, atol=0)


def test_measures_come_back_as_they_were_packed() -> None:
    sketch = [float(number) for number in range(SKETCHED)]
    measures = Measures([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [0.0, 7.0, 8.0], [[], sketch, sketch])
    packed = measures.pack()
    assert measures.unpack(packed) == measures
    assert packed.nbytes == 4 * (6 + 2 * (1 + SKETCHED))


def gradients(context: Context, rank: int, step: int) -> list[torch.Tensor]:
    """Return noise of each rank, larger from step to step, and a constant part."""
    draw = torch.Generator().manual_seed(context.seed + 1000 * step + rank)
    steady = torch.Generator().manual_seed(context.seed)
    return [
        (1 + step / STEPS)
        * (torch.randn(shape, generator=draw) + 0.3 * torch.randn(shape, generator=steady))
        for shape in SHAPES
    ]


def run_adam(context: Context, scaled: bool) -> None:
    """Compare the second moment with the second moment of the averaged gradients.

    Without the correction, their quotient is 2.5 to 6. With it and SEED, the quotient is 1.15 on 1
    rank, 1.34 on 2 and 1.75 on 4; only rounding can change these. It is above 1 because early steps
    count too much: otherwise the moment could become negative.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    ddp = wrapped(Weighted(shapes=SHAPES))
    low_rank(ddp, ratio=0.9, scaler=scaler)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    expected = [torch.zeros(shape) for shape in SHAPES]
    for step in range(STEPS):
        of_ranks = [gradients(context, rank, step) for rank in range(context.size)]
        for moment, *ours in zip(expected, *of_ranks, strict=True):
            average = torch.stack(ours).mean(0)
            moment.mul_(0.999).addcmul_(average, average, value=0.001)
        optimizer.zero_grad()
        loss = ddp(*of_ranks[context.rank])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    found = [optimizer.state[parameter]["exp_avg_sq"] for parameter in ddp.parameters()]
    torch.testing.assert_close(found[-1], expected[-1])
    of_matrices = [sum(float(moment.sum()) for moment in both[:-1]) for both in (found, expected)]
    assert 0.7 < of_matrices[0] / of_matrices[1] < 2.1, of_matrices


@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_adams_second_moment_equals_the_gradients_own(pool: Pool, scaled: bool) -> None:
    pool.run(run_adam, scaled, seed=SEED)
