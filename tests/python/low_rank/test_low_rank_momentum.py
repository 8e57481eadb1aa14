"""SGD's momentum loses a part along the directions that were sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Context, Pool
from harness.hooks import low_rank
from harness.layer_drop_ddp import SHAPES, Weighted, wrapped
from harness.low_rank import (
    MATRICES,
    assert_near,
    backward,
    normal,
    ranks_now,
    started,
    wide_normal,
)

from torch_hbmcomm.low_rank.optimizer import MomentumDamper
from torch_hbmcomm.low_rank.ranks import Matrix, matrix_of

pytestmark = pytest.mark.ranks(1, 2, 4)

STEPS = 14


def damp(context: Context, damping: float) -> None:
    """Check that SGD's momentum is damped along the result's columns, and Adam's is not."""
    ddp, state = started(context, dtype=torch.float64, ratio=0.8, damping=damping)
    parameters = list(ddp.parameters())
    momentum = torch.optim.SGD(parameters[:-1], lr=0, momentum=0.9)
    adam = torch.optim.AdamW(parameters[-1:], lr=0, betas=(0.9, 0.999))
    expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(STEPS):
        came = backward(ddp, wide_normal(context, context.rank, step))
        ranks = ranks_now(state)
        momentum.step()
        adam.step()
        for index, gradient in enumerate(came[:-1]):
            if (rank := ranks.get(f"all.{index}", 0)) > 0:
                rows, columns = MATRICES[f"all.{index}"]
                basis = torch.linalg.svd(gradient.view(rows, columns)).U[:, :rank]
                along = basis @ (basis.T @ expected[index].view(rows, columns))
                expected[index] -= damping * along.view(gradient.shape)
            expected[index].mul_(0.9).add_(gradient)
            found = momentum.state[parameters[index]]["momentum_buffer"]
            assert_near(found, expected[index], f"step {step}, the momentum of parameter {index}")
        expected[-1].mul_(0.9).add_(came[-1], alpha=0.1)
        assert_near(adam.state[parameters[-1]]["exp_avg"], expected[-1], f"step {step}, Adam")
    assert any(rank > 0 for name, rank in ranks.items() if name != f"all.{len(SHAPES) - 1}")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("damping", [0, 0.5, 1])
def test_momentum_is_damped_along_sent_directions(pool: Pool, damping: float) -> None:
    pool.run(damp, damping)


def damp_one(context: Context) -> None:
    """A state with an `optimizer` argument does not change the momentum of another optimizer."""
    ddp = wrapped(Weighted())
    given, other = (torch.optim.SGD(ddp.parameters(), lr=0, momentum=0.9) for _ in range(2))
    low_rank(ddp, ratio=0.8, damping=0.5, optimizer=[given])
    parameter = ddp.module.all[3]
    plain = torch.zeros(SHAPES[3])
    for step in range(4):
        plain = plain * 0.9 + backward(ddp, normal(context, context.rank, step))[3]
        other.step()
        given.step()
    torch.testing.assert_close(other.state[parameter]["momentum_buffer"], plain)
    assert (given.state[parameter]["momentum_buffer"] - plain).norm() > 0.1 * plain.norm()


@pytest.mark.ranks(1, 2)
def test_a_given_optimizer_alone_is_damped(pool: Pool) -> None:
    pool.run(damp_one)


class Outer(torch.optim.Optimizer):
    """An optimizer without state that calls another optimizer's step().

    ZeroRedundancyOptimizer is one.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("wrapped_in", [lambda inner: inner, Outer], ids=["alone", "within"])
def test_momentum_is_damped_in_the_step_that_uses_it(wrapped_in: Any, found_inf: Any) -> None:
    """The damping waits for a step that changes the momentum.

    The outer optimizer's own step() changes no momentum. Nor does a step that a fused optimizer
    skips because a GradScaler has found an infinity.
    """
    weight = torch.nn.Parameter(torch.zeros(6, 5))
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.5, fused=True)
    outer = wrapped_in(inner)
    weight.grad = torch.randn(6, 5)
    inner.step()
    before = inner.state[weight]["momentum_buffer"].clone()
    damper = MomentumDamper(0.5)
    basis = torch.linalg.qr(torch.randn(6, 2)).Q
    damper.add(weight, Matrix("weight", 6, 5, 4), basis)
    if found_inf is not None:
        inner.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
    weight.grad = torch.zeros(6, 5)
    outer.step()
    expected = before if found_inf else 0.5 * (before - 0.5 * basis @ (basis.T @ before))
    torch.testing.assert_close(inner.state[weight]["momentum_buffer"], expected)


def test_momentum_of_kernels_is_damped() -> None:
    """A kernel's matrix has its elements in another order than the kernel's momentum."""
    weight = torch.nn.Parameter(torch.zeros(8, 8, 3, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    weight.grad = torch.randn(8, 8, 3, 3)
    optimizer.step()
    before = optimizer.state[weight]["momentum_buffer"].permute(0, 2, 3, 1).reshape(24, 24)
    damper = MomentumDamper(1)
    basis = torch.linalg.qr(torch.randn(24, 2)).Q
    matrix = matrix_of("weight", weight.shape, 4)
    assert matrix is not None
    damper.add(weight, matrix, basis)
    weight.grad = torch.zeros(8, 8, 3, 3)
    optimizer.step()
    found = optimizer.state[weight]["momentum_buffer"].permute(0, 2, 3, 1).reshape(24, 24)
    torch.testing.assert_close(found, 0.5 * (before - basis @ (basis.T @ before)))
