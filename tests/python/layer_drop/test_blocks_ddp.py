"""With target="blocks" blocks are sent whole or not at all, and nothing is lost."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.catch_up import RATE, Reference
from harness.data import assert_same
from harness.hooks import layer_drop
from harness.layer_drop_ddp import (
    SHAPES,
    Weighted,
    backward,
    everyones,
    gradients,
    residuals_of,
    started,
    wrapped,
)
from torch import nn

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.layer_drop.packing import Packing

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

BLOCK = 64
BLOCKS: dict[str, Any] = {"target": "blocks", "ratio": 0.8, "block": BLOCK, "min_numel": 1000}
PACKED: dict[str, Any] = BLOCKS | {"levels": 1}
of_both = pytest.mark.parametrize("settings", [BLOCKS, PACKED], ids=["float32", "packed"])


def blocks_of(values: torch.Tensor) -> list[torch.Tensor]:
    """Cut a parameter of at least 8 * BLOCK elements."""
    return list(values.flatten().split(BLOCK))


def is_cut(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and torch.Size(shape).numel() >= BLOCKS["min_numel"]


def send_blocks(context: Context, options: Any, ddp_options: Any) -> None:
    """Check that each block of .grad is zero or the mean of the residuals, which are whole numbers.
    Check the residuals after it, too."""
    ddp, state = started(ddp_options=ddp_options, **BLOCKS | options)
    waiting = [[torch.zeros(shape) for shape in SHAPES] for _ in range(context.size)]
    came_whole = 0
    for step in range(25):
        for own, new in zip(waiting, everyones(context, step), strict=True):
            for total, gradient in zip(own, new, strict=True):
                total += gradient
        found = backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
        for index, came in enumerate(found):
            assert came is not None
            means = torch.stack([own[index] for own in waiting]).mean(0)
            if not is_cut(SHAPES[index]):
                assert_same(came, means, f"step {step}, parameter {index}")
                for own in waiting:
                    own[index].zero_()
                continue
            ages = state.state_dict()["rule"]["ages"][f"all.{index}"]
            for number, block in enumerate(blocks_of(came)):
                if ages[number]:
                    assert not block.any(), f"step {step}, block {number}, which waits"
                    continue
                came_whole += bool(block.any())
                assert_same(block, blocks_of(means)[number], f"step {step}, block {number}")
                for own in waiting:
                    own[index].view(-1)[number * BLOCK : (number + 1) * BLOCK] = 0
    for index, residual in enumerate(residuals_of(state)):
        assert_same(residual, waiting[context.rank][index], f"the residual of parameter {index}")
    counts = state.summary()
    assert came_whole > 0 and counts["waiting"] > 0
    # The first steps send additional bytes, together 0.8 of the gradients of a step.
    share = counts["sent_bytes"] / counts["gradient_bytes"]
    assert share == pytest.approx(0.2 + 0.8 / 25, abs=0.01)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_age": 30}, {"static_graph": True}),
    ({}, {"bucket_cap_mb": 25, "gradient_as_bucket_view": True}),
]


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_blocks_are_sent_whole_or_not_at_all(pool: Pool, number: int) -> None:
    pool.run(send_blocks, *OPTIONS[number])


def compare_buckets(context: Context, settings: dict[str, Any]) -> None:
    one, _ = started(ddp_options={"bucket_cap_mb": 25}, **settings)
    other, _ = started(ddp_options={"bucket_cap_mb": 0.001}, **settings)
    for step in range(12):
        own = gradients(context.seed, context.rank, step, context.size)
        for ours, theirs in zip(backward(one, [*own]), backward(other, [*own]), strict=True):
            assert ours is not None and theirs is not None
            assert_same(ours, theirs, f"step {step}")


@of_both
def test_blocks_do_not_depend_on_buckets(pool: Pool, settings: dict[str, Any]) -> None:
    pool.run(compare_buckets, settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nothing_is_lost(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(keep_everything, dtype)


def keep_everything(
    context: Context, dtype: torch.dtype, settings: dict[str, Any] = BLOCKS
) -> dict[str, float]:
    """Check conservation by whole numbers, also through drain(). Returns the counts before it."""
    ddp, state = started(dtype, **settings)
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
    before = [parameter.detach().clone().double() for parameter in ddp.parameters()]
    for index, (residual, gone, whole) in enumerate(
        zip(residuals_of(state), sent, computed, strict=True)
    ):
        both = torch.stack([residual.double(), whole])
        dist.all_reduce(both)
        assert_same(gone + both[0], both[1], f"sent and residual of parameter {index}")
        computed[index] = both[1] - gone
    counts = state.summary()
    state.drain(torch.optim.SGD(ddp.parameters(), lr=1))
    for parameter, old, rest in zip(ddp.parameters(), before, computed, strict=True):
        assert_same(old - parameter.detach().double(), rest / context.size, "drained")
    return counts


def round_on_the_way(context: Context) -> None:
    """Rank 0 alone has gradients, so that only its rounding counts."""
    ddp, state = started(**BLOCKS, wire_dtype=torch.bfloat16)
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


def send_whole_numbers(context: Context, levels: int) -> None:
    """Check conservation, and that the bytes keep the budget."""
    counts = keep_everything(context, torch.float32, PACKED | {"levels": levels})
    share = counts["sent_bytes"] / counts["gradient_bytes"]
    assert share < 0.2 + 0.8 / counts["steps"] + 0.01


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("levels", [1, 31])
def test_whole_numbers_lose_nothing(pool: Pool, levels: int) -> None:
    pool.run(send_whole_numbers, levels)


def send_all_as_numbers(context: Context, settings: dict[str, Any]) -> None:
    """Check that nothing but rounding errors waits, and the bytes."""
    ddp, state = started(**PACKED | settings)
    counts = [torch.Size(shape).numel() for shape in SHAPES]
    cut = [count for count, shape in zip(counts, SHAPES, strict=True) if is_cut(shape)]
    numbers = 2 * len(SHAPES) + sum(-(-count // BLOCK) for count in cut)
    fixed = 4 * (sum(counts) - sum(cut) + numbers)
    packed = Packing(1, context.size).element_bytes * sum(cut)
    for step in range(4):
        before = state.summary()["sent_bytes"]
        own = gradients(context.seed, context.rank, step, context.size)
        backward(ddp, [one.abs() + context.size for one in own])  # zeros would not be sent
        found = state.summary()
        assert packed <= found["sent_bytes"] - before - fixed <= packed + 4 * len(cut)
        assert found["oldest_age"] == 0 and found["sent_share"] == 1


@pytest.mark.parametrize("settings", [{"ratio": 0.0}, {"warmup": 4}], ids=["ratio", "warmup"])
def test_all_is_sent_as_whole_numbers(pool: Pool, settings: dict[str, Any]) -> None:
    pool.run(send_all_as_numbers, settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whole_numbers_are_for_float32(pool: Pool, dtype: torch.dtype) -> None:
    """Blocks of another dtype are sent as they are."""
    pool.run(keep_everything, dtype, PACKED)


OPTIMIZERS: list[dict[str, Any]] = [
    {"kind": torch.optim.AdamW},
    {"kind": torch.optim.SGD, "momentum": 0.9, "weight_decay": 0.1},
]


def train(context: Context, settings: dict[str, Any]) -> None:
    """Every rank takes the steps of the reference, one for each block, with gradients that came."""
    shapes = [(40, 50), (30,)]
    ddp = wrapped(Weighted(torch.float64, shapes))
    layer_drop(ddp, **BLOCKS)
    parameter, other = ddp.parameters()
    terms = {name: value for name, value in settings.items() if name != "kind"}
    optimizer = settings["kind"](ddp.parameters(), lr=RATE, **terms)
    references = [Reference(one.clone(), settings) for one in blocks_of(parameter.detach())]
    ages = [0] * len(references)
    moved = 0
    for step in range(1, 30):
        weights = [
            torch.randn(shape, dtype=torch.float64, generator=context.generator) for shape in shapes
        ]
        ddp.zero_grad()
        ddp(*weights).backward()
        before = [one.clone() for one in blocks_of(parameter.detach())]
        optimizer.step()
        assert parameter.grad is not None
        for index, (came, found) in enumerate(
            zip(blocks_of(parameter.grad), blocks_of(parameter.detach()), strict=True)
        ):
            ages[index] += 1
            if came.any():
                references[index].catch_up(came, ages[index], step)
                torch.testing.assert_close(found, references[index].values, rtol=1e-8, atol=1e-9)
                moved += ages[index] > 1
                ages[index] = 0
            else:
                assert_same(found, before[index], f"block {index}, which waits")
    assert moved > 0
    first = parameter.detach().clone()
    dist.broadcast(first, 0)
    assert_same(parameter.detach(), first, "the parameter of rank 0")
    assert other.detach().any()


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_training_equals_the_reference(pool: Pool, number: int) -> None:
    pool.run(train, OPTIMIZERS[number])


def scale_losses(context: Context, settings: dict[str, Any]) -> None:
    """Steps that the scaler skips leave no trace."""
    found = []
    for broken in ({2, 3, 9}, set[int]()):
        ddp = wrapped(Weighted())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=RATE)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=4)
        state = layer_drop(ddp, scaler=scaler, **settings)
        for step in range(15):
            for spoilt in (True, False) if step in broken else (False,):
                own = gradients(context.seed, context.rank, step, context.size)
                if spoilt and context.rank == step % context.size:
                    own[3].flatten()[0] = float("nan" if step % 2 else "inf")
                ddp.zero_grad()
                scaler.scale(ddp(*own)).backward()
                scaler.step(optimizer)
                scaler.update()
        assert state.summary()["refused_steps"] == len(broken)
        found.append([*(one.detach() for one in ddp.parameters()), *residuals_of(state)])
    for ours, theirs in zip(*found, strict=True):
        assert_same(ours, theirs, "with and without skipped steps")


@of_both
def test_skipped_steps_leave_no_trace(pool: Pool, settings: dict[str, Any]) -> None:
    pool.run(scale_losses, settings)


def break_one(context: Context, settings: dict[str, Any]) -> None:
    """Check that a NaN of one rank is in .grad on every rank, and in no residual."""
    ddp, state = started(**settings)
    for step in range(6):
        own = gradients(context.seed, context.rank, step, context.size)
        if step == 3 and context.rank == context.size - 1:
            own[3][5, 5] = float("nan")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = backward(ddp, [*own])[3]
        named = [str(one.message) for one in caught if "not finite" in str(one.message)]
        assert found is not None
        assert bool(found.isnan().any()) == bool(named) == (step == 3)
        assert not named or "all.3" in named[0]
    assert all(residual.isfinite().all() for residual in residuals_of(state))


@of_both
def test_a_gradient_that_is_not_finite(pool: Pool, settings: dict[str, Any]) -> None:
    pool.run(break_one, settings)


def leave_unused(context: Context) -> None:
    """Check that the blocks of a parameter that no rank uses keep their residuals and ages."""
    ddp, state = started(ddp_options={"find_unused_parameters": True}, **BLOCKS)
    for step in range(8):
        own: list[torch.Tensor | None] = [
            *gradients(context.seed, context.rank, step, context.size)
        ]
        if step >= 4:
            own[3] = None
        before = residuals_of(state)[3], state.state_dict()["rule"]["ages"].get("all.3")
        backward(ddp, own)
        if step >= 4:
            after = residuals_of(state)[3], state.state_dict()["rule"]["ages"]["all.3"]
            assert_same(after[0], before[0], f"the residual in step {step}")
            assert torch.equal(after[1], before[1])
    assert residuals_of(state)[3].any()


def test_unused_parameters_keep_their_residuals(pool: Pool) -> None:
    pool.run(leave_unused)


def accumulate(context: Context, settings: dict[str, Any]) -> None:
    """Gradients accumulated under no_sync() are as good as their sum."""
    one, other = started(**settings)[0], started(**settings)[0]
    for step in range(6):
        parts = [
            gradients(context.seed, context.rank, 2 * step + part, context.size)
            for part in range(2)
        ]
        one.zero_grad()
        with one.no_sync():
            one(*parts[0]).backward()
        one(*parts[1]).backward()
        sums = [first + second for first, second in zip(*parts, strict=True)]
        for ours, theirs in zip(one.parameters(), backward(other, [*sums]), strict=True):
            assert ours.grad is not None and theirs is not None
            assert_same(ours.grad, theirs, f"step {step}")


@of_both
def test_no_sync(pool: Pool, settings: dict[str, Any]) -> None:
    pool.run(accumulate, settings)


class Kernels(nn.Module):
    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        kernel = torch.zeros(16, 8, 3, 3).to(memory_format=memory_format)
        self.kernel = nn.Parameter(kernel)

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return (self.kernel * weights).sum()


def keep_order(context: Context) -> None:
    """Check that blocks are in the order of memory, and that each moves by its own gradients."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = Kernels(memory_format)
        ddp = wrapped(model)
        state = layer_drop(ddp, **BLOCKS)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
        total = torch.zeros(16, 8, 3, 3)
        for step in range(12):
            draw = torch.Generator().manual_seed(context.seed + step)
            weights = torch.randint(-9, 9, (16, 8, 3, 3), generator=draw).float()
            total += weights
            ddp.zero_grad()
            ddp(weights.to(memory_format=memory_format)).backward()
            optimizer.step()
        waits = state.state_dict()["caches"]["kernel"]
        assert waits.any() and model.kernel.any()
        torch.testing.assert_close(model.kernel.detach() - waits, -total, rtol=1e-4, atol=1e-3)
        flat = waits.permute(0, 2, 3, 1) if memory_format == torch.channels_last else waits
        assert any(not block.any() for block in blocks_of(flat))


def test_memory_formats(pool: Pool) -> None:
    pool.run(keep_order)


def resume(context: Context, settings: dict[str, Any]) -> None:
    ddp, state = started(**settings)
    for step in range(9):
        backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
    saved = copy.deepcopy(state.state_dict())
    again, other = started(ddp_options={"bucket_cap_mb": 25}, **settings)
    other.load_state_dict(saved)
    for step in range(9, 20):
        own = gradients(context.seed, context.rank, step, context.size)
        for ours, theirs in zip(backward(ddp, [*own]), backward(again, [*own]), strict=True):
            assert ours is not None and theirs is not None
            assert_same(ours, theirs, f"step {step}")
    found = [one.summary() for one in (state, other)]
    for one in found if "levels" in settings else ():
        del one["sent_bytes"]  # a bucket has a whole number of integers
    assert found[0] == found[1]
    _, third = started(**settings | {"block": 2 * BLOCK})
    with pytest.raises(ValueError, match=f"use block={BLOCK}"):
        third.load_state_dict(saved)
    _, whole = started(ratio=0.8)
    with pytest.raises(ValueError, match="state"):
        whole.load_state_dict(saved)


@of_both
def test_resumed_training_continues_alike(pool: Pool, settings: dict[str, Any]) -> None:
    pool.run(resume, settings)


def resume_elsewhere(context: Context, states: list[dict[str, Any]], sums: list[Any]) -> None:
    ddp, state = started(**BLOCKS)
    state.load_state_dict(states)
    ages = state.state_dict()["rule"]["ages"]
    for name, saved in states[0]["rule"]["ages"].items():
        assert torch.equal(ages[name], saved)
    for index, (residual, expected) in enumerate(zip(residuals_of(state), sums, strict=True)):
        dist.all_reduce(residual)
        assert_same(residual, expected, f"the sum of the residuals of parameter {index}")
    backward(ddp, [*gradients(context.seed, context.rank, 7, context.size)])


def saved_states(context: Context) -> tuple[dict[str, Any], list[torch.Tensor]]:
    ddp, state = started(**BLOCKS)
    for step in range(7):
        backward(ddp, [*gradients(context.seed, context.rank, step, context.size)])
    sums = residuals_of(state)
    for residual in sums:
        dist.all_reduce(residual)
    return state.state_dict(), sums


@functools.cache
def saved_by(ranks: int) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Return the states of `ranks` ranks, and the sums of their residuals."""
    former = Pool(ranks)
    try:
        found = former.run(saved_states)
    finally:
        former.close()
    return [state for state, _ in found], found[0][1]


@pytest.mark.parametrize("before", [1, 3])
def test_resuming_with_other_ranks_keeps_the_sum(pool: Pool, before: int) -> None:
    pool.run(resume_elsewhere, *saved_by(before))


def differ(context: Context) -> None:
    ddp = wrapped(Weighted())
    with pytest.raises(ValueError, match="block=64 on rank 0 and block=128 on rank 1"):
        config = hbmcomm.LayerDrop(target="blocks", block=64 if context.rank == 0 else 128)
        hbmcomm.LayerDropState(ddp, config)


@pytest.mark.ranks(2, 3)
def test_settings_that_differ(pool: Pool) -> None:
    pool.run(differ)
