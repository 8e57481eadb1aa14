"""OuterSteps against a serial reference, and its schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.outer_steps import Counting, Serial, adam, inner_step, net, outer_vector, vector
from torch import nn

import torch_hbmcomm as hbmcomm

pytestmark = pytest.mark.ranks(1, 2, 4)

CASES: list[dict[str, Any]] = [
    {},
    {"fragments": 3},
    {"fragments": 3, "delay": 1},
    {"fragments": 2, "delay": 3},  # until the next meeting
    {"delay": 4},
    {"delay": 2, "alpha": 0.5},
    {"fragments": 2, "delay": 1, "alpha": 0.25},
    {"outer_lr": 1.0, "momentum": 0.0},
]


def follow_the_reference(context: Context, options: dict[str, Any]) -> None:
    settings = {"every": 6} | options
    model = net()
    optimizer = adam(model)
    outer = hbmcomm.OuterSteps(model, optimizer, **settings)
    serial = Serial(context.size, context.seed, **settings)
    for step in range(20):
        inner_step(model, optimizer, context.seed, context.rank, step)
        outer.step()
        serial.step()
        assert_same(vector(model), vector(serial.models[context.rank]), f"step {step}, inner")
        assert_same(outer_vector(outer, model), serial.outer(), f"step {step}, outer")
    outer.close()
    serial.close()
    assert_same(vector(model), serial.outer(), "the weights at the end")


@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_weights_are_those_of_a_serial_reference(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(follow_the_reference, options)


def average(context: Context) -> None:
    """Average the inner weights: outer_lr=1, without momentum."""
    model = Counting()
    optimizer, outer = model.started(every=2)
    model.move(optimizer, 1)
    outer.step()
    model.move(optimizer, context.rank)
    outer.step()
    expected = 1 + (context.size - 1) / 2
    assert_same(model.weight.detach(), torch.full((3,), expected), "the mean")


def test_the_mean_of_the_workers(pool: Pool) -> None:
    pool.run(average)


def send(context: Context, fragments: int, dtype: torch.dtype | None, width: int) -> None:
    """A meeting sends its fragment, and no more than 1 kB of numbers with it."""
    model = Counting(12_000)
    optimizer, outer = model.started(every=12, fragments=fragments, dtype=dtype)
    sent = 0
    for step in range(1, 13):
        model.move(optimizer, 1)
        outer.step()
        assert outer.stats()["meetings"] == step * fragments // 12
        now = outer.stats()["sent_bytes"]
        if step % (12 // fragments) == 0:
            assert 0 <= now - sent - 12_000 // fragments * width < 1000
        else:
            assert now == sent
        sent = now


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("dtype", "width"), [(None, 4), (torch.bfloat16, 2), (torch.int8, 1)], ids=str
)
@pytest.mark.parametrize("fragments", [1, 4])
def test_fragments_and_narrow_types_divide_the_bytes(
    pool: Pool, fragments: int, dtype: Any, width: int
) -> None:
    pool.run(send, fragments, dtype, width)


def overlap(context: Context) -> None:
    """No rank waits for another before a transfer's delay is over."""
    model = Counting()
    optimizer, outer = model.started(every=4, delay=3)
    if context.rank == 1:
        dist.barrier(context.gloo)
    for _ in range(6):
        model.move(optimizer, 1)
        outer.step()
    if context.rank == 0:
        dist.barrier(context.gloo)  # rank 1 has not begun its first step
    model.move(optimizer, 1)
    outer.step()
    assert outer.stats()["meetings"] == 1
    assert_same(model.weight.detach(), torch.full((3,), 7.0), "the weights")


@pytest.mark.ranks(2)
def test_a_transfer_overlaps_the_next_steps(pool: Pool) -> None:
    pool.run(overlap)


def take_different_steps(context: Context) -> None:
    """Meet after a different number of steps on each rank. All deltas count alike."""
    model = Counting()
    optimizer, outer = model.started(delay=1)
    total = 0.0
    for _ in range(3):
        for _ in range(context.rank + 1):
            model.move(optimizer, 2)
            outer.step()
        outer.meet()
        total += context.size + 1  # the mean of 2, 4, 6 ...
    outer.close()
    assert_same(model.weight.detach(), torch.full((3,), total), "the weights")


def test_workers_take_different_numbers_of_steps(pool: Pool) -> None:
    pool.run(take_different_steps)


def end_early(context: Context) -> None:
    """Rank 0 takes 3 steps, rank 1 takes 6, and they meet every 2."""
    model = Counting()
    optimizer, outer = model.started(every=2)
    for _ in range(3 if context.rank == 0 else 6):
        model.move(optimizer, 1)
        outer.step()
    outer.close()
    outer.close()
    # Both give 2. Rank 0 gives its last step, and rank 1 gives 2. Rank 1 alone gives 2.
    assert_same(model.weight.detach(), torch.full((3,), 2 + 1.5 + 2), "the weights")
    for call in (outer.step, outer.meet, lambda: outer.load_state_dict(None)):
        with pytest.raises(RuntimeError, match=r"after close\(\)"):
            call()


@pytest.mark.ranks(2)
def test_a_worker_ends_early(pool: Pool) -> None:
    pool.run(end_early)


def keep_small_moves(context: Context) -> None:
    """The outer weights of bfloat16 parameters are float32, and do not drift to bfloat16's grid."""
    model = Counting(dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1)
    optimizer, outer = model.started(outer_lr=0.25)
    for _ in range(3):
        model.move(optimizer, 2**-7)  # to the next bfloat16 above 1, or from there
        outer.meet()
    assert torch.equal(model.weight, torch.full_like(model.weight, 1 + 2**-7))
    before = outer.state_dict()["fragments"][0]["weights"]
    assert_same(before, torch.full((3,), 1 + 0.75 * 2**-7), "the outer weights")
    outer.meet()
    assert_same(outer.state_dict()["fragments"][0]["weights"], before, "weights without steps")


def test_outer_weights_are_wider_than_bfloat16_parameters(pool: Pool) -> None:
    pool.run(keep_small_moves)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def average_buffers(context: Context) -> None:
    model = Normed()
    with torch.no_grad():
        model.frozen.fill_(5 + context.rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0)
    outer = hbmcomm.OuterSteps(model, optimizer, every=1)
    statistics = model.norm.running_mean
    assert statistics is not None and model.norm.num_batches_tracked is not None
    statistics.fill_(context.rank)
    model.norm.num_batches_tracked.fill_(2**53 + 1 + context.rank)
    outer.step()
    assert_same(statistics, torch.full((2,), (context.size - 1) / 2), "the average")
    assert model.norm.num_batches_tracked == 2**53 + 1
    assert model.get_buffer("mask").tolist() == [0, float("-inf")]
    assert model.frozen.tolist() == [5, 5]
    statistics.fill_(7)
    with outer.weights():
        assert_same(statistics, torch.full((2,), (context.size - 1) / 2), "the outer buffer")
    assert statistics.tolist() == [7, 7]


def test_buffers_are_averaged_at_a_meeting(pool: Pool) -> None:
    pool.run(average_buffers)


def break_a_buffer(context: Context) -> None:
    model = Normed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0)
    outer = hbmcomm.OuterSteps(model, optimizer, every=1)
    statistics = model.norm.running_mean
    assert statistics is not None
    statistics.fill_(float("nan") if context.rank == 0 else 3)
    with pytest.warns(RuntimeWarning, match="a buffer of rank 0 is not finite"):
        outer.step()
    assert statistics.tolist() == ([0, 0] if context.size == 1 else [3, 3])


def test_a_rank_with_a_broken_buffer_takes_the_others_buffers(pool: Pool) -> None:
    pool.run(break_a_buffer)


def look_at_the_outer_weights(context: Context) -> None:
    model = Counting()
    optimizer, outer = model.started(every=2)
    for _ in range(3):
        model.move(optimizer, 1)
        outer.step()
    with pytest.raises(KeyError), outer.weights():
        assert model.state_dict()["weight"].tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match=r"within weights\(\)"):
            outer.step()
        raise KeyError
    assert model.weight.tolist() == [3, 3, 3]
    outer.close()
    with outer.weights():
        assert model.weight.tolist() == [3, 3, 3]


@pytest.mark.ranks(2)
def test_the_outer_weights_are_in_the_model_for_a_while(pool: Pool) -> None:
    pool.run(look_at_the_outer_weights)
