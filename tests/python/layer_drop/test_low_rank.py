"""layer_drop_hook's default: what waits travels as a low-rank approximation of its cache."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.layer_drop_ddp import SHAPES, Weighted, wrapped
from harness.layer_drop_low_rank import PowerSgd
from harness.pairwise import in_turn
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.layer_drop.low_rank import LowRankRule
from torch_hbmcomm.layer_drop.optimizer import MomentumDamper
from torch_hbmcomm.layer_drop.ranks import Matrix, matrix_of

pytestmark = pytest.mark.ranks(1, 2, 4)

STEPS = 14
MATRICES = {
    **{"all.1": (61, 101), "all.2": (15, 7), "all.3": (80, 80)},
    **{"all.5": (97, 89), "all.7": (41, 217)},
}
RATIOS = [0.5, 0.7, 0.8]
RELAXATIONS = {0.5: 1.0, 0.7: 1.9, 0.8: 1.2}
WAYS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 25},
    {"static_graph": True},
]


def started(
    context: Context,
    ddp_options: Any = None,
    backend: str = "hbm",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[DistributedDataParallel, hbmcomm.LayerDropState]:
    group = dist.new_group(backend=backend)
    ddp = wrapped(Weighted(dtype), process_group=group, **(ddp_options or {}))
    state = hbmcomm.LayerDropState(group, model=ddp, **options)
    ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
    return ddp, state


def normal(context: Context, rank: int, step: int) -> list[torch.Tensor]:
    """Gradients of which a part goes on in one direction; those of later layers are larger."""
    draw = torch.Generator().manual_seed(context.seed + 1000 * step + rank)
    steady = torch.Generator().manual_seed(context.seed)
    found = []
    for index, shape in enumerate(SHAPES):
        noise = torch.randn(shape, generator=draw)
        if len(shape) > 1:
            left = torch.randn((*shape[:-1], 1), generator=steady)
            noise += left * torch.randn(shape[-1], generator=steady)
        found.append(noise * (1 + index))
    return found


def wide_normal(context: Context, rank: int, step: int) -> list[torch.Tensor]:
    return [gradient.double() for gradient in normal(context, rank, step)]


def ranks_now(state: hbmcomm.LayerDropState) -> dict[str, int]:
    """The ranks of the step whose backward() was the last thing that happened."""
    rule = state._rule
    assert isinstance(rule, LowRankRule)
    return {name: rule.rank(Matrix(name, *sides, 4)) for name, sides in MATRICES.items()}


def backward(ddp: DistributedDataParallel, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(*weights).backward()
    found = [parameter.grad for parameter in ddp.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def cached(state: hbmcomm.LayerDropState) -> list[torch.Tensor]:
    caches = state.state_dict()["caches"]
    return [caches.get(f"all.{i}", torch.zeros(shape)) for i, shape in enumerate(SHAPES)]


def assert_near(found: torch.Tensor, expected: torch.Tensor, about: str) -> None:
    distance = (found.double() - expected).norm() / (expected.norm() + 1e-9)
    bound = 1e-9 if found.dtype == torch.float64 else 1e-4
    assert distance < bound, f"{about}: {distance:.1e} away"


def follow(context: Context, ratio: float, way: Any, backend: str) -> None:
    """In float64: a basis of columns that nearly depend on each other tells of all rounding."""
    relaxation = RELAXATIONS[ratio]
    ddp, state = started(context, way, backend, torch.float64, ratio=ratio, relaxation=relaxation)
    reference = PowerSgd(relaxation)
    for step in range(STEPS):
        of_ranks = [wide_normal(context, rank, step) for rank in range(context.size)]
        found = backward(ddp, of_ranks[context.rank])
        ranks = ranks_now(state)
        assert step > 0 or all(ranks.values()), "the first step approximates, too"
        expected = reference.step(of_ranks, ranks, MATRICES)
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_near(ours, theirs, f"step {step}, parameter {index}")
            of_all = [torch.empty_like(ours) for _ in range(context.size)]
            dist.all_gather(of_all, ours)
            for other in of_all:
                assert_same(other, ours, f"step {step}, parameter {index} on another rank")
    for index, (ours, theirs) in enumerate(
        zip(cached(state), reference.caches[context.rank], strict=True)
    ):
        assert_near(ours, theirs, f"the cache of parameter {index}")
    assert len(set(ranks.values())) > 1, "ranks follow the energy"


@pytest.mark.parametrize("ratio", RATIOS)
def test_approximations_are_power_sgds(pool: Pool, ratio: float) -> None:
    number = RATIOS.index(ratio)
    backend = in_turn(["hbm", "gloo"], number, pool.size)
    pool.run(follow, ratio, in_turn(WAYS, number, pool.size), backend)


def stand_for_all(context: Context) -> None:
    """One rank that has the average of all gradients, beside all ranks."""
    ddp, state = started(context, dtype=torch.float64, ratio=0.8)
    groups = [dist.new_group([rank]) for rank in range(context.size)]
    alone = wrapped(Weighted(torch.float64), process_group=groups[context.rank])
    other = hbmcomm.LayerDropState(groups[context.rank], model=alone, ratio=0.8)
    alone.register_comm_hook(other, hbmcomm.layer_drop_hook)
    for step in range(STEPS):
        of_ranks = [wide_normal(context, rank, step) for rank in range(context.size)]
        mean = [torch.stack(parts).mean(0) for parts in zip(*of_ranks, strict=True)]
        found, expected = backward(ddp, of_ranks[context.rank]), backward(alone, mean)
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_near(ours, theirs, f"step {step}, parameter {index}")
    assert state.summary()["sent_bytes"] == other.summary()["sent_bytes"]


@pytest.mark.ranks(4)
def test_one_rank_stands_for_all(pool: Pool) -> None:
    """benchmarks/layer_drop/accuracy.py lets one process stand for all ranks."""
    pool.run(stand_for_all)


def keep_everything(context: Context, options: Any) -> None:
    """What was sent and what is cached add up to all gradients, but for rounding in each step."""
    ddp, state = started(context, ratio=0.8, **options)
    sent = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    computed = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    rounded = torch.zeros(len(SHAPES), dtype=torch.float64)
    for step in range(STEPS):
        own = normal(context, context.rank, step)
        for index, came in enumerate(backward(ddp, own)):
            computed[index] += own[index]
            sent[index] += came.double() * context.size
            rounded[index] += 2e-7 * own[index].norm()
            if "wire_dtype" in options:  # a rank's own rounding stays cached, that of sums is lost
                half = torch.finfo(torch.bfloat16).eps / 2  # of a unit: what one rounding loses
                rounded[index] += came.norm() * (context.size - 1) * half
    dist.all_reduce(rounded)
    for index, (cache, gone, whole) in enumerate(zip(cached(state), sent, computed, strict=True)):
        both = torch.stack([cache.double(), whole])
        dist.all_reduce(both)
        assert (gone + both[0] - both[1]).norm() <= rounded[index], f"parameter {index}"


@pytest.mark.parametrize("options", [{}, {"wire_dtype": torch.bfloat16}, {"warmup": 5}])
def test_nothing_is_lost_by_approximating(pool: Pool, options: Any) -> None:
    pool.run(keep_everything, options)


def send_everything(context: Context, options: Any) -> None:
    """Gradients come rounded to bfloat16, and not as approximations."""
    ddp, state = started(context, wire_dtype=torch.bfloat16, **options)
    for step in range(STEPS):
        of_ranks = [normal(context, rank, step) for rank in range(context.size)]
        found = backward(ddp, of_ranks[context.rank])
        for index, parts in enumerate(zip(*of_ranks, strict=True)):
            mean = torch.stack(parts).double().mean(0)
            if mean.numel() > 1:
                assert (found[index] - mean).norm() < 0.02 * mean.norm(), f"parameter {index}"
    assert state.summary()["waiting"] == 0


@pytest.mark.parametrize("options", [{"ratio": 0}, {"ratio": 0.8, "warmup": STEPS}])
def test_nothing_is_approximated_where_everything_is_sent(pool: Pool, options: Any) -> None:
    pool.run(send_everything, options)


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
    """More than the budget is always sent; matrices come after 4 / (1 - ratio) steps all
    the same."""
    model = Weighted(shapes=[(64, 64), (2000,), (64, 100)])
    ddp = wrapped(model)
    state = hbmcomm.LayerDropState(model=ddp, ratio=0.9)
    ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
    came = [0, 0, 0]
    for step in range(100):
        draw = torch.Generator().manual_seed(context.seed + step)
        weights = [torch.randn(one.shape, generator=draw) for one in model.all]
        for index, gradient in enumerate(backward(ddp, weights)):
            came[index] += bool(gradient.any())
    assert came[1] == 100
    assert all(2 <= came[index] < 50 for index in (0, 2)), came


@pytest.mark.ranks(1, 2)
def test_no_matrix_waits_for_ever(pool: Pool) -> None:
    pool.run(lack_a_budget)


def leave_unused(context: Context) -> None:
    """A matrix that nobody used keeps its cache; one that rank 0 alone used is averaged."""
    ddp, state = started(context, {"find_unused_parameters": True}, ratio=0.8)
    applied, total = torch.zeros(SHAPES[3]), torch.zeros(SHAPES[3])
    for step in range(STEPS):
        weights: list[torch.Tensor | None] = [*normal(context, context.rank, step)]
        if step % 3 == 2 or (step % 3 == 1 and context.rank > 0):
            weights[3] = None
        ddp.zero_grad()
        ddp(*weights).backward()
        came = ddp.module.all[3].grad
        assert (came is None) == (step % 3 == 2)
        if came is not None:
            applied += came * context.size
        if weights[3] is not None:
            total += weights[3]
    total += 0
    held = cached(state)[3] - total
    dist.all_reduce(held)
    assert_near(applied, -held.double(), "sent and cached")


def test_unused_matrices_keep_their_caches(pool: Pool) -> None:
    pool.run(leave_unused)


def scale_losses(context: Context) -> None:
    """Steps that the scaler skips leave no trace."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=100)
    one_bucket = {"bucket_cap_mb": 25}  # first ranks follow buckets, and DDP's change
    ddp, state = started(context, one_bucket, ratio=0.8, scaler=scaler)
    twin, other = started(context, one_bucket, ratio=0.8)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
    reference = torch.optim.SGD(twin.parameters(), lr=1)
    for step in range(STEPS):
        own = normal(context, context.rank, step)
        broken = step in (0, 2, 7)  # the first one, which chooses ranks, among them
        if broken and context.rank == step % context.size:
            own[3][0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(ddp(*own)).backward()
        scaler.step(optimizer)
        scaler.update()
        if not broken:
            backward(twin, own)
            reference.step()
    assert state.summary()["refused_steps"] == 3
    for index, (ours, theirs) in enumerate(zip(ddp.parameters(), twin.parameters(), strict=True)):
        assert_near(ours.detach(), theirs.detach().double(), f"parameter {index}")
    assert state.state_dict()["rule"]["ranks"] == other.state_dict()["rule"]["ranks"]


@pytest.mark.ranks(1, 2)
def test_skipped_steps_leave_no_trace_in_factors(pool: Pool) -> None:
    pool.run(scale_losses)


def resume(context: Context) -> None:
    ddp, state = started(context, ratio=0.8)
    for step in range(8):
        backward(ddp, normal(context, context.rank, step))
    saved = copy.deepcopy(state.state_dict())
    again, other = started(context, {"bucket_cap_mb": 25}, ratio=0.8)
    other.load_state_dict(saved)
    for step in range(8, 20):
        own = normal(context, context.rank, step)
        for ours, theirs in zip(backward(ddp, own), backward(again, own), strict=True):
            assert_same(ours, theirs, f"step {step}")
    assert state.summary() == other.summary()


def test_resuming_goes_on_with_the_same_factors(pool: Pool) -> None:
    pool.run(resume)


def damp(context: Context, damping: float) -> None:
    """SGD's momentum loses its part along the columns of what came; Adam's first moment nothing."""
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
def test_momentum_is_damped_along_what_was_sent(pool: Pool, damping: float) -> None:
    pool.run(damp, damping)


class Outer(torch.optim.Optimizer):
    """An optimizer that has another one step, and no state, as ZeroRedundancyOptimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("wrapped_in", [lambda inner: inner, Outer], ids=["alone", "within"])
def test_momentum_is_damped_in_the_step_that_uses_it(wrapped_in: Any, found_inf: Any) -> None:
    """Not by an outer optimizer's, nor by one that a fused optimizer refuses for a GradScaler."""
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
    """The matrix has its elements in another order than the momentum."""
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


@pytest.mark.parametrize(
    ("ratio", "relaxation", "damping"),
    [
        *((0.5, 1.04, 0), (0.8, 1.1, 0), (0.85, 1 + 0.02 / 0.15, 0)),
        *((0.9, 1.2, 0.25), (0.95, 1.2, 0.5), (0.99, 1.2, 0.5)),
    ],
)
def test_defaults_follow_the_budget(ratio: float, relaxation: float, damping: float) -> None:
    config = hbmcomm.LayerDrop(ratio=ratio, target="low_rank")
    assert (config.relaxed, config.damped) == pytest.approx((relaxation, damping))
    given = hbmcomm.LayerDrop(ratio=ratio, target="low_rank", relaxation=1.5, damping=0.1)
    assert (given.relaxed, given.damped) == (1.5, 0.1)


def run_late(context: Context) -> None:
    """Gradients become small, while large ones wait: the matrix goes whole, and is named once."""
    ddp = wrapped(Weighted(shapes=[(64, 64), (10,)]))
    state = hbmcomm.LayerDropState(model=ddp, ratio=0.95)
    ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
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
    pool.run(run_late)


def approximate_more(context: Context) -> None:
    """A checkpoint of a state that sent small matrices whole, which have a rank from now on."""
    small = 2  # the only matrix of fewer than 4096 elements
    ddp, state = started(context, ratio=0.7, min_numel=4096)
    for step in range(8):
        backward(ddp, normal(context, context.rank, step))
    again, other = started(context, ratio=0.7)
    other.load_state_dict(state.state_dict())
    total, came = torch.zeros(SHAPES[small]), torch.zeros(SHAPES[small], dtype=torch.float64)
    for step in range(8, 24):
        own = normal(context, context.rank, step)
        total += own[small]
        came += backward(again, own)[small].double() * context.size
    assert other.state_dict()["rule"]["ranks"][f"all.{small}"] > 0
    rest = total - cached(other)[small]
    dist.all_reduce(rest)
    assert rest.any()
    assert_near(came.float(), rest.double(), "what came")


def test_a_checkpoint_that_sent_small_matrices_whole(pool: Pool) -> None:
    pool.run(approximate_more)


def send_small(context: Context) -> None:
    """Matrices of 24 x 24 elements, of which rank 1 takes a twelfth."""
    ddp = wrapped(Weighted(shapes=[(24, 24)] * 12))
    state = hbmcomm.LayerDropState(model=ddp, ratio=0.9)
    ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
    for _ in range(100):
        backward(ddp, [torch.randn(24, 24) for _ in range(12)])
    counts = state.summary()
    assert 0.09 < counts["sent_bytes"] / counts["gradient_bytes"] < 0.11


def spend(context: Context, warmup: int) -> None:
    """Count the bytes of each step, as parts of the gradients'."""
    ddp = wrapped(Weighted(shapes=[(64, 64)] * 12))
    state = hbmcomm.LayerDropState(model=ddp, ratio=0.95, warmup=warmup)
    ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
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
    """Over the first 1 / (1 - ratio) steps, or at once."""
    pool.run(spend, warmup)


def test_factors_whose_squares_are_no_numbers_are_kept() -> None:
    rule = LowRankRule(hbmcomm.LayerDrop(ratio=0.9, target="low_rank"))
    rule.keep(Matrix("weight", 30, 20, 8), torch.full((20, 2), 1e200, dtype=torch.float64))
    rule.end_step()
    assert rule.state_dict()["rights"]["weight"].max() == 1e200


@pytest.mark.ranks(1, 2)
def test_small_matrices_are_approximated(pool: Pool) -> None:
    pool.run(send_small)


def approximate_kernels(context: Context, memory_format: torch.memory_format) -> None:
    """A gradient of 32 x 16 kernels of 3 x 3 is a matrix of 96 x 48."""
    model = Weighted(shapes=[(32, 16, 3, 3)])
    model.all[0] = torch.nn.Parameter(model.all[0].detach().to(memory_format=memory_format))
    ddp = wrapped(model)
    state = hbmcomm.LayerDropState(model=ddp, ratio=0.8, relaxation=1)
    ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
    draw = torch.Generator().manual_seed(context.seed)
    for _ in range(3):
        outer, inner = torch.randn(32, 3, generator=draw), torch.randn(16, 3, generator=draw)
        weights = torch.einsum("oy,ix->oiyx", outer, inner)
        assert_near(backward(ddp, [weights])[0], weights.double(), "of rank 1")
    assert state.summary()["sent_share"] < 0.3
    cached = state.state_dict()["caches"]["all.0"]
    total, came = cached.double(), torch.zeros(32, 16, 3, 3, dtype=torch.float64)
    for _ in range(9):
        weights = torch.randn(32, 16, 3, 3, generator=context.generator)
        total += weights
        came += backward(ddp, [weights])[0].double() * context.size
    total -= state.state_dict()["caches"]["all.0"]
    dist.all_reduce(total)
    assert_near(came.float(), total, "sent and cached")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_order(pool: Pool, memory_format: torch.memory_format) -> None:
    pool.run(approximate_kernels, memory_format)


def load_channels_last(context: Context) -> None:
    """A state of a model in another memory format: caches go on, and factors begin anew."""
    saved: dict[str, Any] = {}
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = Weighted(shapes=[(32, 16, 3, 3)])
        model.all[0] = torch.nn.Parameter(model.all[0].detach().to(memory_format=memory_format))
        ddp = wrapped(model)
        state = hbmcomm.LayerDropState(model=ddp, ratio=0.8)
        ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
        if saved:
            state.load_state_dict(saved)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.randn(32, 16, 3, 3, generator=context.generator)).backward()
        saved = state.state_dict()


@pytest.mark.ranks(1, 2)
def test_states_of_another_memory_format(pool: Pool) -> None:
    pool.run(load_channels_last)
