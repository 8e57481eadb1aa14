"""layer_drop_hook under DistributedDataParallel makes the paper's decisions, and loses nothing."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.hooks import hooked, layer_drop
from harness.layer_drop_ddp import (
    SHAPES,
    Paper,
    Weighted,
    backward,
    everyones,
    gradients,
    residuals_of,
    started,
    wrapped,
)
from harness.pairwise import in_turn
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import torch_hbmcomm as hbmcomm

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

STEPS = 30

REPRESENTATIVES = ["mean", "l1", "l2"]
OPTIONS: list[dict[str, Any]] = [
    {"ratio": 0.5, "max_age": 8, "warmup": 5},
    {"ratio": 0.0, "max_age": 8},
    {"ratio": 0.95, "min_numel": 0, "max_age": 80, "every": 3},
    {"ratio": 0.9, "fixed_threshold": 6.0, "max_age": 40},
    {"ratio": 0.9, "fixed_threshold": 1e9, "max_age": 3},
    {"ratio": 0.9, "fixed_threshold": 0.0, "max_age": 40},
    {"ratio": 0.9, "max_age": 1},
    {"ratio": 0.8, "target": "paper", "max_age": math.inf, "always_send": False, "every": 6},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LOSSY: list[dict[str, Any]] = [
    {},
    {"cache_dtype": torch.bfloat16},
    {"wire_dtype": torch.bfloat16},
    {"granularity": "module"},
]


def follow_the_paper(context: Context, options: Any, ddp_options: Any) -> None:
    ddp, state = started(ddp_options=ddp_options, **options)
    known = {k: v for k, v in options.items() if k not in ("fixed_threshold", "cache_dtype")}
    paper = Paper(**known)
    if "fixed_threshold" in options:
        paper.threshold, paper.fixed = options["fixed_threshold"], True
    for step in range(STEPS):
        expected = paper.step(everyones(context, step))
        found = backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert ours is not None
            assert_same(ours, theirs, f"step {step}, parameter {index}")
        summary = state.summary()
        if options["ratio"] > 0 and step >= options.get("warmup", 0):
            assert summary["sent_layers"] == sum(paper.sent)
        if paper.threshold is not None:
            assert summary["threshold"] == pytest.approx(paper.threshold, rel=1e-9)
    for ours, theirs in zip(residuals_of(state), paper.residuals[context.rank], strict=True):
        assert_same(ours, theirs, "the cache")
    assert summary["steps"] == STEPS
    if options["ratio"] > 0 and options.get("fixed_threshold") != 0:
        assert summary["sent_bytes"] < summary["gradient_bytes"]


@pytest.mark.parametrize("representative", REPRESENTATIVES)
def test_decisions_are_the_papers(pool: Pool, representative: str) -> None:
    options = {
        "ratio": 0.8,
        "every": 7,
        "max_age": 9,
        "target": in_turn(["bytes", "paper"], REPRESENTATIVES.index(representative), pool.size),
        "representative": representative,
    }
    pool.run(follow_the_paper, options, {})


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_options(pool: Pool, number: int) -> None:
    ddp_options = in_turn([{}, {"gradient_as_bucket_view": True}], number, pool.size)
    pool.run(follow_the_paper, OPTIONS[number], ddp_options)


@pytest.mark.parametrize(
    "ddp_options",
    [{"static_graph": True}, {"bucket_cap_mb": 25}, {"bucket_cap_mb": 0.001}],
)
def test_buckets(pool: Pool, ddp_options: Any) -> None:
    """Use buckets that change, one bucket for all layers, and one bucket for each layer."""
    pool.run(follow_the_paper, {"ratio": 0.7, "every": 5, "max_age": 13}, ddp_options)


def keep_everything(context: Context, dtype: torch.dtype, options: Any) -> None:
    """Check that sent gradients plus residuals equal all gradients, which are whole numbers."""
    ddp, state = started(dtype, ratio=0.8, every=5, **options)
    sent = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    computed = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(12):
        own = gradients(context.seed, context.rank, step, context.size)
        small = [(g / context.size).clamp(-2, 2) * context.size for g in own]
        for total, gradient in zip(computed, small, strict=True):
            total += gradient
        for total, came in zip(sent, backward(ddp, [*small]), strict=True):
            assert came is not None
            total += came.double() * context.size
    for index, (residual, gone, whole) in enumerate(
        zip(residuals_of(state), sent, computed, strict=True)
    ):
        both = torch.stack([residual.double(), whole])
        dist.all_reduce(both)
        assert_same(gone + both[0], both[1], f"sent and residual of parameter {index}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_lost(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(keep_everything, dtype, in_turn(LOSSY, DTYPES.index(dtype), pool.size))


def round_on_the_way(context: Context) -> None:
    """Round on the wire. Rank 0 alone has gradients, so that only its rounding counts."""
    ddp, state = started(ratio=0.5, wire_dtype=torch.bfloat16)
    gone = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(10):
        own = gradients(context.seed, 0, step, 1)
        uneven = [g * 1023 if context.rank == 0 else torch.zeros_like(g) for g in own]
        for sum_, gradient in zip(total, uneven, strict=True):
            sum_ += gradient
        for sum_, came in zip(gone, backward(ddp, [*uneven]), strict=True):
            assert came is not None
            assert_same(came.to(torch.bfloat16).float(), came, "what came")
            sum_ += came.double() * context.size
    if context.rank == 0:
        for residual, sum_, all_ in zip(residuals_of(state), gone, total, strict=True):
            assert_same(sum_ + residual.double(), all_, "sent and residual")


@pytest.mark.ranks(1, 2, 4)
def test_bfloat16_rounding_errors_stay_in_residuals(pool: Pool) -> None:
    pool.run(round_on_the_way)


def accumulate_locally(context: Context) -> None:
    ddp, _ = started(ratio=0.6, max_age=5)
    paper = Paper(ratio=0.6, max_age=5)
    for step in range(12):
        first = everyones(context, 2 * step)
        second = everyones(context, 2 * step + 1)
        both = [
            [a + b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)
        ]
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(*first[context.rank]).backward()
        ddp(*second[context.rank]).backward()
        for parameter, expected in zip(ddp.parameters(), paper.step(both), strict=True):
            assert parameter.grad is not None
            assert_same(parameter.grad, expected, f"step {step}")


def test_no_sync(pool: Pool) -> None:
    pool.run(accumulate_locally)


def leave_unused(context: Context) -> None:
    """Leave parameters unused: DDP discards the hook's results for parameters that no rank used."""
    ddp, state = started(
        ratio=0.6, max_age=3, every=4, ddp_options={"find_unused_parameters": True}
    )
    paper = Paper(ratio=0.6, max_age=3, every=4)
    applied = [torch.zeros(shape) for shape in SHAPES]
    total = [torch.zeros(shape) for shape in SHAPES]
    for step in range(24):
        unused = {context.shared_random.randrange(len(SHAPES)) for _ in range(3)}
        alone = context.shared_random.randrange(len(SHAPES))  # a parameter that rank 0 alone uses
        of_ranks = everyones(context, step)
        for rank, own in enumerate(of_ranks):
            for index in range(len(SHAPES)):
                if index in unused or (index == alone and rank > 0):
                    own[index].zero_()
        weights: list[torch.Tensor | None] = [*of_ranks[context.rank]]
        for index in range(len(SHAPES)):
            if index in unused or (index == alone and context.rank > 0):
                weights[index] = None
        expected = paper.step(of_ranks)
        found = backward(ddp, weights)
        for index, gradient in enumerate(found):
            total[index] += sum(own[index] for own in of_ranks)
            if index in unused:
                assert gradient is None
            else:
                assert gradient is not None
                assert_same(gradient, expected[index], f"step {step}, parameter {index}")
                applied[index] += gradient * context.size
    for index, residual in enumerate(residuals_of(state)):
        dist.all_reduce(residual)
        assert_same(applied[index] + residual, total[index], f"parameter {index}")


def test_unused_parameters_keep_their_residuals(pool: Pool) -> None:
    pool.run(leave_unused)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), lr=0.125)
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.25)


def skip_updates(context: Context, kind: str, given: bool) -> None:
    """Compare with an optimizer that never steps a dropped layer.

    given: True: the state gets the optimizer as an argument; False: it finds the optimizer itself
    """
    ddp, plain = wrapped(Weighted()), Weighted()
    with torch.no_grad():
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            ours.fill_(1)
            theirs.fill_(1)
    optimizer, expected = optimizer_of(kind, ddp), optimizer_of(kind, plain)
    options: Any = {"skip_update": True, "optimizer": optimizer} if given else {}
    layer_drop(ddp, ratio=0.7, **options)
    paper = Paper(ratio=0.7, max_age=13)
    dropped = 0
    for step in range(15):
        yields = paper.step(everyones(context, step))
        dropped += paper.sent.count(False)
        backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
        optimizer.step()
        for parameter, gradient, goes in zip(plain.parameters(), yields, paper.sent, strict=True):
            parameter.grad = gradient if goes else None
        expected.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert_same(ours.detach(), theirs.detach(), f"step {step}")
    assert dropped


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_dropped_layers_are_not_updated(pool: Pool, kind: str, given: bool) -> None:
    pool.run(skip_updates, kind, given)


def find_the_optimizer(context: Context, options: Any, with_closure: bool, moves: bool) -> None:
    """Step an optimizer with strong weight decay, after a backward() that dropped all layers."""
    ddp, state = started(fixed_threshold=1e9, always_send=False, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1, weight_decay=0.5)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.fill_(1)
    backward(ddp, [*gradients(context.seed, context.rank, 0, context.size)])
    optimizer.step(*([lambda: 0.0] if with_closure else []))
    assert state.summary()["sent_layers"] == 0
    for parameter in ddp.parameters():
        assert_same(parameter.detach(), torch.full_like(parameter, 0.5 if moves else 1), "weight")
        assert parameter.grad is not None


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "with_closure", "moves"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"skip_update": False}, False, True),
        ({"target": "paper"}, False, True),
    ],
)
def test_an_optimizer_is_found(pool: Pool, options: Any, with_closure: bool, moves: bool) -> None:
    pool.run(find_the_optimizer, options, with_closure, moves)


def forget_the_state(context: Context) -> None:
    gc.collect()
    watching = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    state = hbmcomm.LayerDropState(wrapped(Weighted()))
    assert len(_global_optimizer_pre_hooks) == watching[0] + 1
    del state
    gc.collect()
    assert watching == (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks))


@pytest.mark.ranks(1, 2)
def test_a_state_that_is_gone_watches_no_optimizer(pool: Pool) -> None:
    pool.run(forget_the_state)


def scale_losses(context: Context) -> None:
    """Check that a gradient that is not finite on one rank has no effect except on the scale."""
    ddp, plain = wrapped(Weighted()), Weighted()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=4)
    state = layer_drop(ddp, scaler=scaler, ratio=0.7, max_age=6, every=3)
    paper = Paper(ratio=0.7, max_age=6, every=3)
    broken = {2, 3, 9, 14}
    for step in range(20):
        own = gradients(context.seed, context.rank, step, context.size)
        if step in broken and context.rank == step % context.size:
            own[step % len(SHAPES)].flatten()[0] = float("nan" if step % 2 else "inf")
        ddp.zero_grad()
        scaler.scale(ddp(*own)).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < before) == (step in broken)
        if step not in broken:
            yields = paper.step(everyones(context, step))
            with torch.no_grad():
                for parameter, gradient in zip(plain.parameters(), yields, strict=True):
                    parameter.sub_(gradient)
        for index, (ours, theirs) in enumerate(
            zip(ddp.parameters(), plain.parameters(), strict=True)
        ):
            assert_same(ours.detach(), theirs.detach(), f"step {step}, parameter {index}")
        for residual, expected in zip(
            residuals_of(state), paper.residuals[context.rank], strict=True
        ):
            assert_same(residual, expected, f"the residual in step {step}")
    assert state.summary()["refused_steps"] == len(broken)


def test_skipped_steps_leave_no_trace(pool: Pool) -> None:
    pool.run(scale_losses)


def clip(context: Context) -> None:
    ddp, state = started(ratio=0.7, max_age=6)
    paper = Paper(ratio=0.7, max_age=6)
    for step in range(10):
        expected = paper.step(everyones(context, step))
        backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        whole = torch.nn.utils.get_total_norm(expected)
        assert norm == pytest.approx(float(whole), rel=1e-5)
    for ours, theirs in zip(residuals_of(state), paper.residuals[context.rank], strict=True):
        assert_same(ours, theirs, "the cache")


def test_clipping_does_not_reach_the_residuals(pool: Pool) -> None:
    pool.run(clip)


def drain(context: Context, options: Any) -> None:
    """After drain(), SGD with a rate of 1 has subtracted the exact mean of all gradients."""
    ddp, state = started(ratio=0.8, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
    expected = [torch.zeros(shape) for shape in SHAPES]
    for step in itertools.count():
        backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
        optimizer.step()
        for own in everyones(context, step):
            for total, gradient in zip(expected, own, strict=True):
                total -= gradient / context.size
        if step >= 9 and state.summary()["waiting"]:  # the last step did not send all layers
            break
    assert state.summary()["cache_norm"] > 0
    state.drain(optimizer)
    for parameter, total in zip(ddp.parameters(), expected, strict=True):
        assert_same(parameter.detach(), total, "after drain()")
    assert state.summary()["cache_norm"] == state.summary()["waiting"] == 0


@pytest.mark.parametrize("options", [{}, {"wire_dtype": torch.bfloat16, "max_age": 2}])
def test_drain_applies_the_residuals(pool: Pool, options: Any) -> None:
    pool.run(drain, options)


def take_memory(context: Context, dtype: torch.dtype | None, bytes_each: int) -> None:
    """Check that a state allocates residuals alone: sent layers are packed in DDP's bucket."""
    ddp, state = started(ratio=0.7, cache_dtype=dtype)
    for step in range(6):
        backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
    rooms = [room for rooms in state._residuals._rooms.values() for room in rooms]
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    assert sum(room.nbytes for room in rooms) == bytes_each * elements


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("dtype", "bytes_each"), [(None, 4), (torch.bfloat16, 2)])
def test_one_copy_of_the_gradients(pool: Pool, dtype: torch.dtype | None, bytes_each: int) -> None:
    pool.run(take_memory, dtype, bytes_each)


def stay_within_the_budget(context: Context, ratio: float, target: Any) -> dict[str, float]:
    """Train layers whose gradients differ in size a thousandfold, and shrink."""
    shapes = [(32, 32 * (1 + index % 7)) for index in range(20)]
    ddp = wrapped(Weighted(shapes=shapes))
    state = hooked(ddp, target, ratio=ratio, min_numel=1024)
    draw = torch.Generator().manual_seed(7 + context.rank)
    for step in range(200):
        ddp.zero_grad()
        weights = [
            torch.randn(shape, generator=draw) * 10 ** (index % 4 - step / 100)
            for index, shape in enumerate(shapes)
        ]
        ddp(*weights).backward()
    return state.summary()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("target", ["low_rank", "bytes"])
@pytest.mark.parametrize(
    "ratio",
    [pytest.param(ratio, marks=pytest.mark.full) for ratio in (0.5, 0.8, 0.95)] + [0.9, 0.99],
)
def test_bytes_follow_the_ratio(pool: Pool, ratio: float, target: str) -> None:
    for summary in pool.run(stay_within_the_budget, ratio, target):
        share = summary["sent_bytes"] / summary["gradient_bytes"]
        assert share == pytest.approx(1 - ratio, abs=0.02)
        assert summary["oldest_age"] <= max(8, round(4 / (1 - ratio)))
