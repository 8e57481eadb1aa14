"""The synchronous parameter server's calls: uneven steps, buffers, checkpoints, and errors.

Every rank raises each error. Every function runs on each rank of a pool; harness/synchronous.py has
the shared functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.synchronous import (
    GROUPS,
    STEPS,
    Uneven,
    adam,
    alone,
    assert_close,
    backward,
    group_of,
    make,
    model_of,
    raised,
    serve_or_work,
    sgd,
    weights,
)
from torch import nn

from torch_hbmcomm import SyncParameterServer

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

# Numbers of steps.


def check_uneven_steps(context: Context, dedicated: bool) -> None:
    """Worker n takes n + 1 steps with the gradient n; later updates get no gradient from it."""
    model = nn.ParameterList([torch.zeros(3)])
    options = {"dedicated": dedicated}
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0), **options)

    def work(worker: int, workers: int) -> None:
        for _ in range(worker + 1):
            model[0].grad = torch.full((3,), float(worker))
            ps.step()

    serve_or_work(ps, context, work, **options)
    workers = context.size - dedicated
    means = [sum(range(first, workers)) / (workers - first) for first in range(workers)]
    assert_close(weights(model), [torch.full((3,), -sum(means))], 1e-6)
    assert ps.stats()["updates"] == workers
    assert "after close" in raised(RuntimeError, ps.step)
    ps.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dedicated", [False, True])
def test_uneven_steps(pool: Pool, dedicated: bool) -> None:
    pool.run(check_uneven_steps, dedicated)


def check_push_every(context: Context) -> None:
    """Take five steps, two for each update. The last update has the gradients of one step."""
    model = nn.ParameterList([torch.zeros(3), torch.zeros(2)])
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0), push_every=2)
    for step in range(5):
        model.zero_grad()
        model[0].grad = torch.full((3,), float(step))
        if step == 1:
            model[1].grad = torch.ones(2)
        ps.step()
    assert ps.stats()["updates"] == 2
    ps.close()
    assert ps.stats()["updates"] == 3
    assert_close(weights(model), [torch.full((3,), -(0.5 + 2.5 + 4)), torch.full((2,), -0.5)], 0)


def test_push_every(pool: Pool) -> None:
    pool.run(check_push_every)


def check_after_update(context: Context) -> None:
    """Use after_update for a dedicated server's learning-rate schedule and checkpoints."""
    model = nn.ParameterList([torch.zeros(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen: list[float] = []
    ps = SyncParameterServer(model, optimizer, dedicated=True)

    def after_update() -> None:
        schedule.step()
        seen.append(ps.state_dict()["model"]["0"][0].item())

    if context.rank == 0:
        ps.serve(after_update)
        assert seen == [-1, -1.5, -1.75]
    else:
        for _ in range(3):
            model[0].grad = torch.ones(2)
            ps.step()
    ps.close()
    assert_close(weights(model), [torch.full((2,), -1.75)], 0)


@pytest.mark.ranks(2, 3)
def test_after_update(pool: Pool) -> None:
    pool.run(check_after_update)


def check_pull(context: Context, buffers: str) -> None:
    """pull() replaces weights that were changed outside of a step."""
    model = nn.BatchNorm1d(3)
    ps = make(context, model, buffers=buffers)
    with torch.no_grad():
        model.weight.fill_(context.rank + 5)
        assert model.running_mean is not None
        model.running_mean.fill_(context.rank + 7)
    ps.pull()
    assert_same(model.weight.detach(), torch.full((3,), 5.0), "weight")
    source = 0 if buffers == "shared" else context.rank
    assert_same(model.running_mean, torch.full((3,), source + 7.0), "running_mean")
    ps.close()


@pytest.mark.parametrize("buffers", ["shared", "local"])
def test_pull(pool: Pool, buffers: str) -> None:
    pool.run(check_pull, buffers)


# Buffers.


class Counting(nn.Module):
    """A model whose buffers have other dtypes than the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: torch.Tensor
        self.mask: torch.Tensor
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool), persistent=False)


def check_buffers(context: Context, group: str, options: dict[str, Any]) -> None:
    model = Counting()
    model.steps.fill_(context.rank + 100)
    ps = make(context, model, group=group_of(context, group), **options)
    assert int(model.steps) == 100  # rank 0, the server, sends its buffers first

    def work(worker: int, workers: int) -> None:
        model.steps.fill_(context.rank)
        model.mask[context.rank] = True
        model.weight.grad = torch.ones(3)
        ps.step()

    serve_or_work(ps, context, work, **options)
    worker = options.get("dedicated", False)  # the lowest rank that is a worker
    if options.get("buffers") == "local":
        assert int(model.steps) == context.rank
    else:
        assert int(model.steps) == int(worker)
        assert model.mask.nonzero().flatten().tolist() == [int(worker)]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("options", [{}, {"dedicated": True}, {"buffers": "local"}], ids=str)
def test_buffers(pool: Pool, group: str, options: dict[str, Any]) -> None:
    pool.run(check_buffers, group, options)


# Checkpoints.


def check_resume(context: Context) -> None:
    """Run half of the steps on all ranks, the rest on one rank fewer. Compare with one process."""
    expected = alone(context, model_of(), adam, steps=2 * STEPS)
    model = model_of()
    ps = make(context, model, adam)
    for step in range(STEPS):
        backward(model, context, step, context.rank, context.size)
        ps.step()
    state = copy.deepcopy(ps.state_dict())
    ps.close()
    assert ("optimizer" in state) == (context.rank == 0)

    fewer = list(range(max(1, context.size - 1)))
    group = dist.new_group(fewer)
    if context.rank in fewer:
        model = Uneven()
        ps = make(context, model, adam, group=group)
        ps.load_state_dict(state if context.rank == 0 else {})
        assert ps.stats()["updates"] == STEPS
        for step in range(STEPS, 2 * STEPS):
            backward(model, context, step, context.rank, len(fewer))
            ps.step()
        ps.close()
        assert_close(weights(model), expected, 1e-5)
        assert ps.state_dict()["updates"] == 2 * STEPS
        dist.destroy_process_group(group)


def test_resume_with_other_workers(pool: Pool) -> None:
    pool.run(check_resume)


def check_wrong_state(context: Context) -> None:
    """Every rank raises the server's error, and has loaded nothing."""
    model = model_of()
    ps = make(context, model, adam)
    backward(model, context, 0, context.rank, context.size)
    ps.step()
    state = copy.deepcopy(ps.state_dict())
    before = copy.deepcopy(state)
    for value in state["model"].values():
        value += 1
    for wrong, error, said in (
        ({"optimizer": None}, ValueError, "no 'optimizer'; load one saved on the server's rank"),
        ({"model": None}, ValueError, "no 'model'; load one saved on the server's rank"),
        ({"updates": None}, ValueError, "no 'updates'; load one saved on the server's rank"),
        ({"updates": "3"}, ValueError, "the state's 'updates' is '3', and no number of steps"),
        ({"updates": -1}, ValueError, "the state's 'updates' is -1, and no number of steps"),
        ({"model": state["model"] | {"x": torch.ones(1)}}, RuntimeError, "Unexpected key"),
        ({"model": state["model"] | {"scale": torch.ones(2)}}, RuntimeError, "size mismatch"),
        ({"model": 3}, TypeError, "Expected state_dict to be dict-like"),
        ({"optimizer": {"param_groups": [], "state": {}}}, ValueError, "parameter groups"),
        ({"optimizer": {}}, KeyError, "param_groups"),
        (None, TypeError, "a state is a mapping, not NoneType"),
    ):
        given: Any = {}
        if context.rank == 0:
            given = None if wrong is None else state | wrong
            for key in [key for key, value in (wrong or {}).items() if value is None]:
                del given[key]
        message = raised(error if context.rank == 0 else RuntimeError, ps.load_state_dict, given)
        assert said in message, message
        assert context.rank == 0 or "rank 0 of the group cannot take part" in message
        torch.testing.assert_close(ps.state_dict(), before, rtol=0, atol=0)
    ps.load_state_dict(state)
    assert_close(weights(model), [value for _, value in state["model"].items()], 0)
    ps.close()


def test_wrong_state(pool: Pool) -> None:
    pool.run(check_wrong_state)


# Errors: every rank has them, and the group continues.


def check_models_differ(context: Context) -> None:
    last = context.size - 1
    changes: list[tuple[Callable[[Uneven], object], str]] = [
        (lambda m: setattr(m, "second", nn.Linear(31, 4)), "second.weight (float32 [4, 31]"),
        (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(2))), "more (float32 [2]"),
        (lambda m: m.second.double(), "second.weight (float64 [3, 31]"),
        (lambda m: m.register_buffer("more", torch.ones(2)), "7 parameters and buffers"),
    ]
    for change, complaint in changes:
        model = Uneven()
        if context.rank == last:
            change(model)
        message = raised(ValueError, make, context, model)
        assert f"rank {last} has" in message and complaint in message, message


@pytest.mark.ranks(2, 3, 4)
def test_models_differ(pool: Pool) -> None:
    pool.run(check_models_differ)


def check_bad_terms(context: Context) -> None:
    terms: list[tuple[dict[str, Any], str]] = [
        ({"server": context.size}, f"has ranks 0 to {context.size - 1}"),
        ({"buffers": "global"}, 'buffers is "shared" or "local", not \'global\''),
        ({"push_every": 0}, "push_every is at least 1, not 0"),
    ]
    for options, complaint in terms:
        message = raised(ValueError, make, context, Uneven(), **options)
        assert complaint in message
    at_server = context.rank == 0
    error = ValueError if at_server else RuntimeError
    message = raised(error, SyncParameterServer, Uneven(), None)
    assert "the server needs an optimizer, and got None" in message
    stranger = sgd([torch.zeros(1, requires_grad=True)])
    message = raised(error, SyncParameterServer, Uneven(), stranger if at_server else None)
    assert "is not the model's" in message
    if context.size == 1:
        complaint = raised(ValueError, make, context, Uneven(), dedicated=True)
        assert "leaves a group of 1 rank no worker" in complaint
    else:
        own = 1 + (context.rank == context.size - 1)
        complaint = raised(ValueError, make, context, Uneven(), push_every=own)
        assert f"rank {context.size - 1} has push_every=2, rank 0 has push_every=1" in complaint


def test_bad_terms(pool: Pool) -> None:
    pool.run(check_bad_terms)


def check_bad_tensors(context: Context) -> None:
    """The tensors of the last rank alone are bad; all ranks raise an error."""
    last = context.rank == context.size - 1
    gaps = nn.ParameterList([torch.zeros(4, 3)[:, :2]])
    nowhere = nn.ParameterList([torch.zeros(3, device="meta")])
    cases: list[tuple[nn.Module, type[Exception], str]] = [
        (gaps, ValueError, "does not fill a range of memory"),
        (nn.LazyLinear(3), ValueError, "no shape yet"),
        (nowhere, TypeError, "on meta: only dense CPU tensors"),
    ]
    for bad, error, complaint in cases:
        model = bad if last else Uneven()
        message = raised(error if last else RuntimeError, make, context, model)
        assert complaint in message, message
        assert last or f"rank {context.size - 1} of the group cannot take part: " in message


def test_bad_tensors(pool: Pool) -> None:
    pool.run(check_bad_tensors)


def check_calls_differ(context: Context) -> None:
    model = model_of()
    ps = make(context, model)
    mine = ps.step if context.rank == 0 else ps.pull
    message = raised(RuntimeError, mine)
    assert "step() by ranks [0]" in message and "pull() by ranks [1" in message
    ps.pull()
    ps.close()


@pytest.mark.ranks(2, 3)
def test_calls_differ(pool: Pool) -> None:
    pool.run(check_calls_differ)


def check_roles(context: Context) -> None:
    model = model_of()
    ps = make(context, model, dedicated=True)
    if context.rank == 0:
        assert "it runs serve()" in raised(RuntimeError, ps.step)
        ps.serve()
    else:
        assert "is for a dedicated server" in raised(RuntimeError, ps.serve)
    ps.close()


@pytest.mark.ranks(2, 3)
def test_roles(pool: Pool) -> None:
    pool.run(check_roles)


def check_serving_again(context: Context) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        ps = SyncParameterServer(model, optimizer, dedicated=True)
        if context.rank == 0:
            assert "under a parameter server" in raised(RuntimeError, optimizer.step)
            ps.serve()
            optimizer.step()  # the server is closed
        else:
            backward(model, context, 0, context.rank, context.size)
            ps.step()
            ps.close()


@pytest.mark.ranks(2)
def test_serving_again_with_the_same_optimizer(pool: Pool) -> None:
    pool.run(check_serving_again)


def check_given_up(context: Context) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(ArithmeticError),
        SyncParameterServer(model, optimizer) as ps,
    ):
        raise ArithmeticError("deliberate")
    optimizer.step()
    assert ps.stats()["updates"] == 0


def test_the_optimizer_is_free_after_an_error(fresh_pool: Pool) -> None:
    fresh_pool.run(check_given_up)


def check_closure(context: Context) -> None:
    model = model_of()
    ps = make(context, model)

    def closure() -> int:
        backward(model, context, 0, context.rank, context.size)
        return context.rank

    assert ps.step(closure) == context.rank
    assert ps.step() is None
    ps.close()
    assert ps.stats()["updates"] == 2


def test_closure(pool: Pool) -> None:
    pool.run(check_closure)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("deliberate")


def check_update_fails(context: Context) -> None:
    model = model_of()
    ps = make(context, model, Failing)
    backward(model, context, 0)
    if context.rank == 0:
        assert raised(ArithmeticError, ps.step) == "deliberate"
    else:
        assert "the server (rank 0) failed after update 0" in raised(RuntimeError, ps.step)
    ps.close()


def test_update_fails(pool: Pool) -> None:
    pool.run(check_update_fails)
