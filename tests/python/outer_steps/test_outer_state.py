"""Checkpoints of OuterSteps: training continues with the same bits, or with other ranks."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
from harness import Context, Pool
from harness.data import assert_same
from harness.outer_steps import Counting, adam, inner_step, net, outer_vector, vector

import torch_hbmcomm as hbmcomm

pytestmark = pytest.mark.ranks(1, 2, 4)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"fragments": 2, "delay": 2},
    {"delay": 3, "alpha": 0.5, "dtype": torch.bfloat16},
    {"fragments": 2, "delay": 2, "dtype": torch.int8},
]


def file_of(*states: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return file


def resume(context: Context, options: dict[str, Any], at: int) -> None:
    settings = {"every": 4} | options
    model = net(torch.float32)
    optimizer = adam(model)
    outer = hbmcomm.OuterSteps(model, optimizer, **settings)
    for step in range(at):
        inner_step(model, optimizer, context.seed, context.rank, step)
        outer.step()
    file = file_of(outer.state_dict(), optimizer.state_dict())

    again = net(torch.float32)
    with torch.no_grad():
        next(again.parameters()).add_(1)
    other = adam(again)
    resumed = hbmcomm.OuterSteps(again, other, **settings)
    saved, inner = torch.load(file)
    resumed.load_state_dict(saved)
    other.load_state_dict(inner)
    for step in range(at, at + 9):
        for one, stepper, owner in ((model, optimizer, outer), (again, other, resumed)):
            inner_step(one, stepper, context.seed, context.rank, step)
            owner.step()
        assert_same(vector(again), vector(model), f"step {step}, inner")
        assert_same(outer_vector(resumed, again), outer_vector(outer, model), f"step {step}")
    assert resumed.stats() == outer.stats()
    outer.close()
    resumed.close()
    assert_same(vector(again), vector(model), "the end")


@pytest.mark.parametrize("at", [5, 7, 8])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_resumed_training_continues_alike(pool: Pool, options: dict[str, Any], at: int) -> None:
    pool.run(resume, options, at)


def resume_between_steps(context: Context) -> None:
    """Ranks save at different steps: rank 0 before the transfer is applied, the others after."""
    model = Counting()
    optimizer, outer = model.started(delay=2)
    model.move(optimizer, 1)
    outer.meet()
    for _ in range(1 + context.rank):
        model.move(optimizer, 1)
        outer.step()
    assert outer.stats()["meetings"] == (context.rank > 0)
    saved = outer.state_dict()
    again = Counting()
    other, resumed = again.started(delay=2)
    resumed.load_state_dict(saved)
    for one, stepper, owner in ((model, optimizer, outer), (again, other, resumed)):
        one.move(stepper, 1)
        owner.step()
        owner.close()
    assert_same(vector(again), vector(model), "the end")
    assert_same(vector(again), torch.full((3,), 3 + (context.size - 1) / 2), "the mean")


def test_ranks_at_different_steps_resume_alike(pool: Pool) -> None:
    pool.run(resume_between_steps)


def join_others(context: Context) -> None:
    """Only rank 1 has a state. It keeps its steps; the other ranks take the outer weights."""
    model = Counting()
    optimizer, outer = model.started(every=2, dtype=torch.bfloat16)
    for step in range(3):
        model.move(optimizer, 257 if step == 0 else 1)  # 258, which bfloat16 has, then 1
        outer.step()
    saved = outer.state_dict() | {"ranks": 7}
    model = Counting()
    with torch.no_grad():
        model.weight.fill_(context.rank)
    optimizer, outer = model.started(every=2, dtype=torch.bfloat16)
    outer.load_state_dict(saved if context.rank == 1 else None)
    assert_same(vector(model), torch.full((3,), 259.0 if context.rank == 1 else 258.0), "inner")
    assert_same(outer_vector(outer, model), torch.full((3,), 258.0), "outer")
    assert outer.stats()["steps"] == 3 and outer.stats()["meetings"] == 1
    model.move(optimizer, 1)
    outer.step()
    expected = 258 + 1 + 1 / context.size
    assert_same(vector(model), torch.full((3,), expected), "the mean")


@pytest.mark.ranks(2, 4)
def test_ranks_without_a_state_take_the_outer_weights(pool: Pool) -> None:
    pool.run(join_others)


def save(context: Context) -> dict[str, Any]:
    """Meet after two steps, at twice the mean of 1, 2, 3 ..., and take one more step."""
    model = Counting()
    optimizer, outer = model.started(every=2)
    for _ in range(3):
        model.move(optimizer, context.rank + 1)
        outer.step()
    return outer.state_dict()


@functools.cache
def saved_by(ranks: int) -> list[dict[str, Any]]:
    former = Pool(ranks)
    try:
        return former.run(save)
    finally:
        former.close()


def resume_elsewhere(context: Context, states: list[dict[str, Any]]) -> None:
    """A rank with a state keeps its last step. A state without a rank is left out."""
    model = Counting()
    optimizer, outer = model.started(every=2)
    outer.load_state_dict(states[context.rank] if context.rank < len(states) else None)
    met = len(states) + 1.0
    steps = [rank + 1 if rank < len(states) else 0 for rank in range(context.size)]
    assert_same(outer_vector(outer, model), torch.full((3,), met), "the outer weights")
    assert_same(vector(model), torch.full((3,), met + steps[context.rank]), "the inner weights")
    model.move(optimizer, context.size)
    outer.step()
    expected = met + sum(steps) / context.size + context.size
    assert_same(vector(model), torch.full((3,), expected), "the mean")


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("before", [1, 3])
def test_a_checkpoint_of_another_number_of_ranks(pool: Pool, before: int) -> None:
    pool.run(resume_elsewhere, saved_by(before))


def fall_behind(context: Context) -> None:
    """Rank 0's state is one meeting old. It takes the outer weights, and loses its steps."""
    model = Counting()
    optimizer, outer = model.started()
    states = []
    for _ in range(2):
        model.move(optimizer, 8)
        outer.meet()
        model.move(optimizer, 1)
        states.append(outer.state_dict())
    model = Counting()
    optimizer, outer = model.started()
    outer.load_state_dict(states[0 if context.rank == 0 else 1])
    assert_same(outer_vector(outer, model), torch.full((3,), 17.0), "the outer weights")
    late = 0 if context.rank == 0 else 1
    assert_same(vector(model), torch.full((3,), 17.0 + late), "the inner weights")


@pytest.mark.ranks(2)
def test_a_rank_that_is_behind_takes_the_outer_weights(pool: Pool) -> None:
    pool.run(fall_behind)


def refuse(context: Context) -> None:
    model = Counting()
    optimizer, outer = model.started(every=2)
    model.move(optimizer, 1)
    good = outer.state_dict()
    bad: list[tuple[Any, type[Exception], str]] = [
        ([], TypeError, "a state is a mapping or None, not list"),
        ({"rank": 0}, ValueError, "the state lacks buffers, "),
        (good | {"tensors": []}, ValueError, "of another model: they differ in parameter weight"),
        (good | {"fragments": good["fragments"] * 2}, ValueError, "load it with fragments=2"),
    ]
    for state, kind, text in bad:
        with pytest.raises(kind if context.rank == 1 else RuntimeError, match=text):
            outer.load_state_dict(state if context.rank == 1 else good)
        assert vector(model).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="None on every rank"):
        outer.load_state_dict(None)
    outer.load_state_dict(good)


@pytest.mark.ranks(2)
def test_a_state_that_does_not_fit_is_refused(pool: Pool) -> None:
    pool.run(refuse)
