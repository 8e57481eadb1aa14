"""DDP hooks with error feedback: all or nothing sent, zeros, and gradients that are not finite."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.hooks import hooked, layer_drop, low_rank
from harness.layer_drop_ddp import SHAPES, Weighted, everyones, gradients, wrapped
from torch import nn

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.low_rank.measures import Measures

pytestmark = pytest.mark.ranks(1, 2, 3)


def drop_little(context: Context) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hbmcomm.LowRankState(wrapped(nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))))
        hbmcomm.LowRankState(wrapped(nn.Linear(50, 50)), hbmcomm.LowRank(ratio=0, min_numel=4096))
        hbmcomm.LayerDropState(wrapped(nn.Linear(50, 50)), hbmcomm.LayerDrop(fixed_threshold=1))
    with pytest.warns(RuntimeWarning, match=r"always sent are 100% of the model.*min_numel=4096"):
        hbmcomm.LowRankState(wrapped(nn.Linear(50, 50)), hbmcomm.LowRank(min_numel=4096))
    with pytest.warns(RuntimeWarning, match=r"always sent are 100% of the model.*min_numel=4096"):
        hbmcomm.LayerDropState(wrapped(nn.Linear(50, 50)))
    with pytest.warns(RuntimeWarning, match=r"100% of the model.*one row, .*min_numel=64 elements"):
        hbmcomm.LowRankState(wrapped(nn.Linear(5000, 1)))


def test_a_model_of_layers_that_are_always_sent(pool: Pool) -> None:
    pool.run(drop_little)


def drain_too_much(context: Context) -> None:
    ddp = wrapped(Weighted(torch.float16))
    state = layer_drop(ddp, fixed_threshold=1e30, max_age=99)
    for _ in range(2):
        ddp.zero_grad()
        ddp(*(torch.full(shape, 4e4, dtype=torch.float16) for shape in SHAPES)).backward()
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    with pytest.raises(OverflowError, match=r"residual of all\.\d is not finite as torch\.float16"):
        state.drain(torch.optim.SGD(ddp.parameters(), lr=1))
    for parameter, old in zip(ddp.parameters(), before, strict=True):
        assert_same(parameter.detach(), old, "nothing was applied")
    assert state.summary()["cache_norm"] > 0


def test_draining_more_than_a_gradient_can_hold(pool: Pool) -> None:
    pool.run(drain_too_much)


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Mixed(nn.Module):
    """A matrix of each dtype, so that DDP makes a bucket for each."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(80, 80, dtype=dtype) for dtype in DTYPES)

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        parts = [(one * weights.to(one.dtype)).sum().double() for one in self.all]
        return torch.stack(parts).sum()


def train_mixed(context: Context, static: bool, kind: str) -> None:
    """Check all updates. In the first iteration of a static graph, all buckets have index 0."""
    ddp = wrapped(Mixed(), static_graph=static)
    low: Any = hbmcomm.LowRankState(ddp, hbmcomm.LowRank(ratio=0.5)), hbmcomm.low_rank_hook
    drop: Any = hbmcomm.LayerDropState(ddp, hbmcomm.LayerDrop(ratio=0.5, every=2))
    state, hook = low if kind == "low_rank" else (drop, hbmcomm.layer_drop_hook)
    numbers: list[int] = []

    def watched(state, bucket):  # type: ignore[no-untyped-def]
        numbers.append(bucket.index())
        return hook(state, bucket)

    ddp.register_comm_hook(state, watched)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
    expected = torch.zeros(80, 80, dtype=torch.float64)
    for step in range(4):
        optimizer.zero_grad()
        of_ranks = [
            torch.randint(-4, 5, (80, 80), generator=torch.Generator().manual_seed(seed))
            for seed in range(context.seed + 10 * step, context.seed + 10 * step + context.size)
        ]
        ddp(of_ranks[context.rank] * float(context.size)).backward()
        optimizer.step()
        expected -= torch.stack(of_ranks).sum(0)
        assert state.summary()["steps"] == step + 1
        state.state_dict()
    assert numbers == ([0, 0, 0] if static else [0, 1, 2]) + 3 * [0, 1, 2]
    state.drain(optimizer)
    for parameter in ddp.parameters():
        bound = 2 if parameter.dtype == torch.bfloat16 else 1e-3
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=0, atol=bound)


@pytest.mark.filterwarnings("ignore:layers that are always sent:RuntimeWarning")
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kind", ["low_rank", "bytes"])
def test_parameters_of_several_dtypes(pool: Pool, static: bool, kind: str) -> None:
    pool.run(train_mixed, static, kind)


class Padded(torch.optim.Optimizer):
    """An optimizer whose closure has another name and comes after another argument."""

    def step(self, extra: int = 0, *, run: Any) -> None:  # type: ignore[override]
        raise AssertionError("drain() does not call this")


def drain_several(context: Context) -> None:
    """Check that a refused drain() changes nothing. Then call drain() with two optimizers."""
    ddp = wrapped(Weighted())
    state = layer_drop(ddp, fixed_threshold=1e30, max_age=99)
    weights = gradients(context.seed, context.rank, 0, context.size)
    ddp(*weights).backward()
    parameters = list(ddp.parameters())
    one = torch.optim.SGD(parameters[:3], lr=1)
    two = torch.optim.SGD([{"params": parameters[3:6]}, {"params": parameters[6:]}], lr=1)
    one.step()
    two.step()
    before = [parameter.detach().clone() for parameter in parameters]
    norm = state.summary()["cache_norm"]
    assert norm > 0
    lbfgs = torch.optim.LBFGS(parameters)
    torch.optim.lr_scheduler.StepLR(lbfgs, 1)  # replaces step()
    last = context.size - 1
    for bad, kind, complaint in (
        (one, ValueError, r"drain\(\): no optimizer that was given has all\.3, all\.4"),
        ([two], ValueError, r"has all\.0, all\.1, all\.2: give all that step the model"),
        ([one, 3], TypeError, "optimizer is one or several, not int"),
        (lbfgs, ValueError, r"LBFGS\.step\(\) needs a closure"),
        ([one, two, lbfgs], ValueError, r"LBFGS\.step\(\) needs a closure"),
        (Padded(parameters, {}), ValueError, r"Padded\.step\(\) needs a closure"),
    ):
        with pytest.raises(kind, match=complaint):
            state.drain(bad)  # type: ignore[arg-type]
        error = kind if context.rank == last else RuntimeError
        with pytest.raises(error, match=complaint):
            state.drain(bad if context.rank == last else [one, two])  # type: ignore[arg-type]
        assert state.summary()["cache_norm"] == norm
        for parameter, old in zip(parameters, before, strict=True):
            assert_same(parameter.detach(), old, "nothing was applied")
    state.drain([one, two])
    assert state.summary()["cache_norm"] == 0
    for index, parameter in enumerate(parameters):
        of_ranks = [gradients(context.seed, r, 0, context.size)[index] for r in range(context.size)]
        assert_same(parameter.detach(), 0 - torch.stack(of_ranks).mean(0), f"parameter {index}")
        assert parameter.grad is None


def test_draining_by_several_optimizers(pool: Pool) -> None:
    pool.run(drain_several)


def drop_all(context: Context) -> None:
    """Zeros are not sent, even of layers that are always sent."""
    ddp = wrapped(Weighted())
    state = layer_drop(ddp, fixed_threshold=1e30, min_numel=0, max_age=10**6)
    for weights in (
        [torch.zeros(shape) for shape in SHAPES],
        [torch.zeros(1) if len(shape) == 1 else torch.ones(shape) for shape in SHAPES],
    ):
        ddp.zero_grad()
        ddp(*weights).backward()
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()
        assert state.summary()["sent_share"] == 0
    assert state.summary()["cache_norm"] > 0


def test_all_layers_dropped(pool: Pool) -> None:
    pool.run(drop_all)


def train_zeros(context: Context) -> None:
    """Check that a threshold of 0 lets everything except zeros through."""
    ddp = wrapped(Weighted())
    layer_drop(ddp, ratio=0.9, every=1)
    zeros = [torch.zeros(shape) for shape in SHAPES]
    for weights in (zeros, zeros, gradients(context.seed, context.rank, 0, context.size)):
        ddp.zero_grad()
        ddp(*weights).backward()
    means = [torch.stack(one).mean(0) for one in zip(*everyones(context, 0), strict=True)]
    for index, (parameter, mean) in enumerate(zip(ddp.parameters(), means, strict=True)):
        assert parameter.grad is not None
        assert_same(parameter.grad, mean, f"parameter {index}")


def test_all_gradients_zero(pool: Pool) -> None:
    pool.run(train_zeros)


def break_one(context: Context, value: float, before: int, kind: str, options: Any) -> None:
    ddp = wrapped(Weighted())
    state = hooked(ddp, kind, **options)
    weights = gradients(context.seed, context.rank, 0, context.size)
    for _ in range(before):
        ddp(*weights).backward()
        ddp.zero_grad()
    if context.rank == context.size - 1:
        weights[3][5, 6] = value
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp(*weights).backward()
    assert any("gradient of all.3 is not finite" in str(one.message) for one in caught)
    found = [parameter.grad for parameter in ddp.parameters()]
    assert found[3] is not None and not found[3].isfinite().all()
    assert_same(found[3].isfinite().sum(), torch.tensor(80 * 80 - 1), "the others are finite")
    for index in set(range(len(SHAPES))) - {3}:
        gradient = found[index]
        assert gradient is not None and gradient.isfinite().all()
    assert "all.3" not in state.state_dict()["caches"]  # the bad gradient is not in the residual


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("low_rank", {}), ("bytes", {"fixed_threshold": 1e30, "max_age": 10**6})],
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_gradient_that_is_not_finite(
    pool: Pool, value: float, before: int, kind: str, options: Any
) -> None:
    pool.run(break_one, value, before, kind, options)


def wait_in_vain(context: Context) -> None:
    """A layer is sent after max_age steps, even with the lowest score."""
    ddp = wrapped(Weighted())
    state = layer_drop(ddp, ratio=0.5, max_age=4, target="paper", every=10**6)
    last = 0
    for step in range(25):
        weights = gradients(context.seed, context.rank, 0, context.size)
        weights[3] = torch.full(SHAPES[3], 1e-6 * context.size)
        ddp.zero_grad()
        ddp(*weights).backward()
        gradient = ddp.module.all[3].grad
        if gradient.any():
            assert step - last <= 5
            assert float(gradient.mean()) == pytest.approx(
                1e-6 * context.size * max(step - last, 1)
            )
            last = step
        assert state.summary()["oldest_age"] <= 4
    assert last >= 20


def test_no_layer_waits_for_ever(pool: Pool) -> None:
    pool.run(wait_in_vain)


def train_scalars(context: Context, kind: str) -> None:
    """Parameters without a dimension are averaged in every step, and are in checkpoints."""
    shapes: list[tuple[int, ...]] = [(), (80, 80), ()]
    ddp = wrapped(Weighted(shapes=shapes))
    state = hooked(ddp, kind, ratio=0.8)
    for step in range(5):
        if step == 3:
            state.load_state_dict(state.state_dict())
        ddp.zero_grad()
        draw = torch.Generator().manual_seed(context.seed + step)
        weights = torch.randn(context.size, 2, generator=draw)
        first, last = weights[context.rank]
        ddp(first, torch.randn(80, 80, generator=context.generator), last).backward()
        for index, expected in zip((0, 2), weights.mean(0), strict=True):
            gradient = ddp.module.all[index].grad
            assert gradient is not None and gradient.shape == ()
            torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("kind", ["low_rank", "bytes", "paper", "blocks"])
def test_parameters_without_a_dimension(pool: Pool, kind: str) -> None:
    pool.run(train_scalars, kind)


def exceed_float32(context: Context, dtype: torch.dtype, size: float) -> None:
    """Check that gradients count as finite even if L1 and L2 sums exceed float32's largest number.

    A fixed seed repeats the gradients, so that only rounding differs between runs. The sent bytes
    depend on the budget alone.
    """
    shapes = [(80, 80), (300,)]
    ddp = wrapped(Weighted(dtype, shapes=shapes))
    state = low_rank(ddp, ratio=0.5)
    given, came = torch.zeros(2, 80, 80, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            ddp.zero_grad()
            weights = [torch.randn(shape, generator=context.generator) for shape in shapes]
            given += weights[0]
            ddp(*(weight.to(dtype) * size for weight in weights)).backward()
            came += ddp.module.all[0].grad.double() / size * context.size
    given -= state.state_dict()["caches"]["all.0"].double() / size
    dist.all_reduce(given)
    torch.testing.assert_close(came, given, rtol=0, atol=1e-4 * float(given.norm()))
    assert state.summary()["sent_share"] < 0.6


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e35), (torch.float64, 1e150)])
def test_measures_beyond_float32(pool: Pool, dtype: torch.dtype, size: float) -> None:
    pool.run(exceed_float32, dtype, size, seed=1)


def test_measures_stay_finite_where_they_are() -> None:
    sketch = [1e300, -1e39, math.inf, 3.0]
    measures = Measures([1e39, math.nan, 2.0], [math.inf, 1.0, 1e-9], [0.0, 1e200, 0.0], [[]] * 3)
    packed = Measures([1.0], [1.0], [1e200], [sketch]).pack()
    assert (packed.isfinite() == torch.tensor([True] * 5 + [False, True])).all()
    assert packed[4] == -packed[3] < -1e30 and packed[6] == 3
    found = measures.unpack(measures.pack() * 1000 / 1000)  # as an average over 1000 ranks
    assert math.isfinite(found.residual_sums[0]) and math.isnan(found.residual_sums[1])
    assert found.gradients[0] == math.inf and found.residual_sums[2] == 2
