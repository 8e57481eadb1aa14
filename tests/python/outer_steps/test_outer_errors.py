"""Deltas that are narrow, not finite, or scaled: nothing is lost silently."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.outer_steps import Counting, adam, inner_step, net, outer_vector, vector

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.tensors import power_of_two_above

pytestmark = pytest.mark.ranks(1, 2, 4)

COUNT = 2500  # three blocks of int8 scales, the last one not full


def conserve(context: Context, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Whole-number steps are in the outer weights, in a residual, or still in the inner weights."""
    model = Counting(COUNT)
    optimizer, outer = model.started(every=4, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(context.seed + context.rank)
    taken = torch.zeros(COUNT)
    some_waits = False
    for _ in range(15):
        by = torch.randint(-3000, 3000, (COUNT,), generator=generator).float()
        if dtype == torch.bfloat16:  # sums are exact if one rank alone moves an element
            by[torch.arange(COUNT) % context.size != context.rank] = 0
        model.move(optimizer, by)
        taken += by
        outer.step()
        state = outer.state_dict()  # waits, so that all sums are there
        weights = torch.cat([one["weights"] for one in state["fragments"]])
        waiting = model.weight.detach() - weights
        rest = torch.cat(
            [
                torch.zeros_like(one["weights"]) if one["residual"] is None else one["residual"]
                for one in state["fragments"]
            ]
        )
        some_waits |= bool(rest.any())
        total = torch.stack([taken, waiting + rest])
        dist.all_reduce(total)
        assert_same(context.size * weights + total[1], total[0], "the sum of all steps")
    assert some_waits


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}, {"delay": 3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_narrow_deltas_lose_nothing(pool: Pool, dtype: Any, options: dict[str, Any]) -> None:
    pool.run(conserve, dtype, options)


@pytest.mark.ranks(2)
def test_scales_are_powers_of_two() -> None:
    values = torch.tensor([0, 1e-45, 1, 1.5, 2, 2.0000002, 3e38 / 2])
    found = power_of_two_above(values)
    tiny = math.ldexp(1, -126)
    assert found.tolist() == [tiny, tiny, 1, 2, 2, 4, math.ldexp(1, 127)]


def refuse_a_delta(context: Context, value: float, dtype: torch.dtype | None, delay: int) -> None:
    """The last rank's delta is left out, and the rank takes the outer weights."""
    bad = context.size - 1
    model = Counting()
    optimizer, outer = model.started(every=2, dtype=dtype, delay=delay, momentum=0.5)
    for step in range(2 + delay):
        model.move(optimizer, value if (context.rank, step) == (bad, 1) else 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outer.step()
    (warning,) = (one for one in caught if one.category is RuntimeWarning)
    assert f"the delta or a buffer of rank {bad} is not finite" in str(warning.message)
    assert outer.stats()["refused"] == 1
    moved = 0.0 if context.size == 1 else 2 * 1.5  # momentum of the first step
    assert_same(outer_vector(outer, model), torch.full((3,), moved), "the outer weights")
    late = 0 if context.rank == bad else delay
    assert_same(vector(model), torch.full((3,), moved + late), "the inner weights")
    outer.close()
    assert vector(model).isfinite().all()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_a_delta_that_is_not_finite_is_left_out(
    pool: Pool, value: float, dtype: Any, delay: int
) -> None:
    pool.run(refuse_a_delta, value, dtype, delay)


def end_badly(context: Context) -> None:
    """close() returns if last deltas, or the outer weights themselves, are not finite."""
    model = Counting()
    optimizer, outer = model.started(every=2)
    model.move(optimizer, math.nan)
    outer.step()
    with pytest.warns(RuntimeWarning, match="rank 0 is not finite"):
        outer.close()
    assert vector(model).tolist() == [0, 0, 0]

    with torch.no_grad():
        model.weight.fill_(3e38)
    optimizer, outer = model.started(every=1, outer_lr=100)
    model.move(optimizer, 1e37)
    outer.step()
    assert vector(model).tolist() == [math.inf] * 3
    with pytest.warns(RuntimeWarning, match="rank 0 is not finite"):
        outer.close()


def test_close_ends_without_a_finite_delta(pool: Pool) -> None:
    pool.run(end_badly)


def scale(context: Context) -> None:
    """Train with a GradScaler that skips a step on rank 0 alone, and accumulated gradients."""
    model = net(torch.float32)
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    outer = hbmcomm.OuterSteps(model, optimizer, every=3, dtype=torch.bfloat16)
    for step in range(7):
        optimizer.zero_grad()
        for part in range(2):
            inputs = torch.full((4, 5), 1.0 + part + context.rank)
            scaler.scale(model(inputs).square().mean()).backward()
        before = vector(model).clone()
        if (context.rank, step) == (0, 1):
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        assert (scaler.get_scale() < 2**10) == (context.rank == 0 and step >= 1)
        assert torch.equal(before, vector(model)) == ((context.rank, step) == (0, 1))
        outer.step()
    assert outer.stats() | {"sent_bytes": 0} == {
        **{"steps": 7, "meetings": 2, "refused": 0, "sent_bytes": 0}
    }
    outer.close()
    low, high = vector(model).clone(), vector(model).clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    assert_same(low, high, "the weights of all ranks")


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scaler_and_a_schedule(pool: Pool) -> None:
    pool.run(scale)


def be_near(context: Context, dtype: torch.dtype, bound: float) -> None:
    """Training with narrow deltas stays near training with wide deltas."""
    found = []
    for chosen in (None, dtype):
        model = net(torch.float32)
        optimizer = adam(model)
        outer = hbmcomm.OuterSteps(model, optimizer, every=2, dtype=chosen)
        start = vector(model).clone()
        for step in range(30):
            inner_step(model, optimizer, context.seed, context.rank, step)
            outer.step()
        outer.close()
        found.append(vector(model) - start)
    assert (found[0] - found[1]).norm() < bound * found[0].norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.int8, 0.2)], ids=str)
def test_narrow_deltas_train_alike(pool: Pool, dtype: Any, bound: float) -> None:
    pool.run(be_near, dtype, bound)
