"""Approximations keep to the budget of bytes, and nothing waits for ever."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from harness import Context, Pool
from harness.hooks import low_rank
from harness.layer_drop_ddp import Weighted, wrapped
from harness.low_rank import backward, normal, started

import torch_hbmcomm as hbmcomm

pytestmark = pytest.mark.ranks(1, 2, 4)

SEED = 1


def warm_up(context: Context) -> None:
    ddp, state = started(context, ratio=0.8, warmup=12)
    backward(ddp, normal(context, context.rank, 0))
    ranks = state.state_dict()["rule"]["ranks"]
    for step in range(1, 12):
        backward(ddp, normal(context, context.rank, step))
    assert state.state_dict()["rule"]["ranks"] == ranks


def test_ranks_stay_while_everything_is_sent(pool: Pool) -> None:
    pool.run(warm_up)


def lack_a_budget(context: Context) -> None:
    """Send matrices although a vector alone exceeds the budget. Gradients do not change the result.

    Matrices are sent in the first 1 / (1 - ratio) steps, whose budget is larger. Later they are
    sent after each wait of 4 / (1 - ratio) steps, for the 5 steps between two choices of ranks.
    """
    model = Weighted(shapes=[(64, 64), (2000,), (64, 100)])
    ddp = wrapped(model)
    low_rank(ddp, ratio=0.9)
    came: list[list[int]] = [[], [], []]
    for step in range(100):
        draw = torch.Generator().manual_seed(context.seed + step)
        weights = [torch.randn(one.shape, generator=draw) for one in model.all]
        for index, gradient in enumerate(backward(ddp, weights)):
            if gradient.any():
                came[index].append(step)
    assert came[1] == list(range(100))
    assert came[0] == came[2] == [*range(10), *range(50, 55), *range(95, 100)]


@pytest.mark.ranks(1, 2)
def test_no_matrix_waits_for_ever(pool: Pool) -> None:
    pool.run(lack_a_budget)


@pytest.mark.parametrize(
    ("ratio", "relaxation", "damping"),
    [
        *((0, 1.02, 0), (0.5, 1.04, 0), (0.65, 1 + 0.02 / 0.35, 0.125), (0.8, 1.1, 0.25)),
        *((0.85, 1 + 0.02 / 0.15, 0.25), (0.9, 1.2, 0.25), (0.925, 1.2, 0.375)),
        *((0.95, 1.2, 0.5), (0.99, 1.2, 0.5)),
    ],
)
def test_defaults_follow_the_budget(ratio: float, relaxation: float, damping: float) -> None:
    config = hbmcomm.LowRank(ratio=ratio)
    assert (config.relaxed, config.damped) == pytest.approx((relaxation, damping))
    given = hbmcomm.LowRank(ratio=ratio, relaxation=1.5, damping=0.1)
    assert (given.relaxed, given.damped) == (1.5, 0.1)


def run_late(context: Context) -> None:
    """Gradients become small while large gradients wait: the matrix is sent whole, with a warning.

    It is sent whole when the L1 sum of its residual exceeds 80 times the running mean of the
    gradients' L1 sums. In the first 45 steps this is impossible, because the residual has at most
    40 large gradients. SEED fixes the step in which the matrix is sent whole.
    """
    ddp = wrapped(Weighted(shapes=[(64, 64), (10,)]))
    state = low_rank(ddp, ratio=0.95)
    whole = []
    with pytest.warns(RuntimeWarning, match="the loss is at risk: .* waited in all.0 ") as warned:
        for step in range(120):
            noise = torch.randn(64, 64, generator=context.generator)
            backward(ddp, [noise * (1 if step < 40 else 1e-4), torch.ones(10)])
            if state.summary()["sent_layers"] == 2:
                whole.append(step)
                assert "all.0" not in state.state_dict()["caches"]
    assert whole and min(whole) > 45, whole
    assert sum("at risk" in str(warning.message) for warning in warned) == 1


@pytest.mark.ranks(1, 2)
def test_a_matrix_goes_whole_before_too_much_waits(pool: Pool) -> None:
    pool.run(run_late, seed=SEED)


def send_small(context: Context) -> None:
    """Train matrices of 24 x 24 elements. An approximation of rank 1 has a twelfth of the bytes.

    All columns cost the same, so the bytes depend on the budget, and not on the gradients.
    """
    ddp = wrapped(Weighted(shapes=[(24, 24)] * 12))
    state = low_rank(ddp, ratio=0.9)
    for _ in range(100):
        backward(ddp, [torch.randn(24, 24) for _ in range(12)])
    counts = state.summary()
    assert 0.09 < counts["sent_bytes"] / counts["gradient_bytes"] < 0.11


def spend(context: Context, warmup: int) -> None:
    """Count the bytes of each step, relative to the gradients' bytes.

    All columns cost the same, so the bytes depend on the budget, and not on the gradients.
    """
    ddp = wrapped(Weighted(shapes=[(64, 64)] * 12))
    state = low_rank(ddp, ratio=0.95, warmup=warmup)
    sent = [0.0]
    for _ in range(200):
        backward(ddp, [torch.randn(64, 64, generator=context.generator) for _ in range(12)])
        counts = state.summary()
        sent.append(counts["sent_bytes"] / counts["gradient_bytes"] * counts["steps"])
    if warmup:
        assert sent[1] == 1
    else:
        assert max(after - before for before, after in pairwise(sent)) < 0.11
        assert sent[20] == pytest.approx(0.05 * 20 + 0.95, rel=0.05)
    assert sent[100] == pytest.approx(0.05 * 100 + 0.95, rel=0.03)
    assert sent[200] - sent[100] == pytest.approx(0.05 * 100, rel=0.03)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("warmup", [0, 1])
def test_first_steps_send_a_gradient_besides(pool: Pool, warmup: int) -> None:
    """The extra bytes are sent over the first 1 / (1 - ratio) steps, or in one warm-up step."""
    pool.run(spend, warmup)


@pytest.mark.ranks(1, 2)
def test_matrices_of_few_elements_are_approximated(pool: Pool) -> None:
    pool.run(send_small)
