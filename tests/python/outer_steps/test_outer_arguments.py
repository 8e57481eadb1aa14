"""Wrong arguments of OuterSteps raise on every rank, and the group stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.outer_steps import adam, net
from harness.training import mesh_of, sharded
from torch import nn

import torch_hbmcomm as hbmcomm

pytestmark = pytest.mark.ranks(2)


def refuse(context: Context, options: dict[str, Any], kind: type[Exception], text: str) -> None:
    """Rank 1 has a wrong argument, which it raises. Rank 0 raises its text."""
    model = net()
    before = [one.detach().clone() for one in model.parameters()]
    settings = {"every": 6} | (options if context.rank == 1 else {})
    with pytest.raises(kind if context.rank == 1 else RuntimeError, match=text):
        hbmcomm.OuterSteps(model, adam(model), **settings)
    assert all(map(torch.equal, before, model.parameters()))
    hbmcomm.OuterSteps(model, adam(model), every=6).close()


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"every": 0}, ValueError, "every is at least 1, not 0"),
        ({"every": 2.5}, TypeError, "every is a whole number, not 2.5"),
        ({"every": 6, "fragments": 4}, ValueError, "no multiple of fragments=4"),
        ({"fragments": 2, "delay": 4}, ValueError, "longer than the 3 steps"),
        ({"delay": -1}, ValueError, "delay is at least 0 steps"),
        ({"outer_lr": 0}, ValueError, "outer_lr is more than 0"),
        ({"outer_lr": "0.7"}, TypeError, "outer_lr is a number, not '0.7'"),
        ({"momentum": 1}, ValueError, r"momentum is in \[0, 1\), not 1"),
        ({"alpha": 1.5}, ValueError, r"alpha is in \[0, 1\]"),
        ({"dtype": torch.float16}, ValueError, "dtype is None or one of torch.float32"),
        ({"every": None, "fragments": 1000}, ValueError, "too many for 66 elements"),
        ({"workers": 2}, ValueError, "workers=2 is for boxes: give box too"),
    ],
    ids=str,
)
def test_a_wrong_argument_raises_on_every_rank(
    pool: Pool, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    pool.run(refuse, options, kind, text)


def differ(context: Context, options: dict[str, Any], text: str) -> None:
    model = net()
    settings = {"every": 6} | (options if context.rank == 1 else {})
    with pytest.raises(ValueError, match=f"rank 1 has .*{text}"):
        hbmcomm.OuterSteps(model, adam(model), **settings)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 12}, "every=12, rank 0 has every=6"),
        ({"outer_lr": 0.5}, "outer_lr=0.5, rank 0 has outer_lr=0.7"),
        ({"dtype": torch.int8}, "dtype=torch.int8, rank 0 has dtype=None"),
    ],
    ids=str,
)
def test_arguments_that_differ_raise_on_every_rank(
    pool: Pool, options: dict[str, Any], text: str
) -> None:
    pool.run(differ, options, text)


def complex_model() -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


def with_gaps() -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.ones(8)[::2])
    return model


MODELS: list[tuple[Callable[[], nn.Module], str]] = [
    (complex_model, "parameter extra is torch.complex64"),
    (with_gaps, "parameter extra of shape .* does not fill a range of memory"),
    (lambda: nn.LazyLinear(2), "parameter weight has no shape yet"),
    (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
]


def refuse_model(context: Context, index: int) -> None:
    make, text = MODELS[index]
    model = make()
    with pytest.raises(ValueError, match=text):
        hbmcomm.OuterSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)


@pytest.mark.parametrize("index", range(len(MODELS)))
def test_a_model_that_cannot_be_averaged_is_refused(pool: Pool, index: int) -> None:
    pool.run(refuse_model, index)


def differ_in_the_model(context: Context) -> None:
    model = nn.Linear(2, 2 + context.rank)
    with pytest.raises(ValueError, match=r"rank 1 has parameter weight .*\[3, 2\].*rank 0 has"):
        hbmcomm.OuterSteps(model, adam(model), every=1)
    model = nn.Linear(2, 2, bias=context.rank == 0)
    with pytest.raises(ValueError, match="rank 1 has 1 tensors, rank 0 has 2 tensors"):
        hbmcomm.OuterSteps(model, adam(model), every=1)


def test_models_that_differ_raise_on_every_rank(pool: Pool) -> None:
    pool.run(differ_in_the_model)


def lack_a_parameter(context: Context) -> None:
    model = net()
    optimizer = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    with pytest.raises(ValueError, match=r"OuterSteps: no optimizer that was given has 0\.weight"):
        hbmcomm.OuterSteps(model, optimizer, every=1)


def test_an_optimizer_without_a_parameter_is_refused(pool: Pool) -> None:
    pool.run(lack_a_parameter)


def change_the_model(context: Context) -> None:
    model = net()
    outer = hbmcomm.OuterSteps(model, adam(model), every=1)
    model.float()
    with pytest.raises(RuntimeError, match=r"the model has .*float32.* now, and had .*float64"):
        outer.step()


def test_a_model_that_has_changed_is_named(fresh_pool: Pool) -> None:
    fresh_pool.run(change_the_model)


def refuse_one_mesh(context: Context) -> None:
    """Ranks that have parts of one parameter have nothing to average."""
    assert dist.group.WORLD is not None
    model = sharded(dist.group.WORLD, net())
    other = 1 - context.rank
    with pytest.raises(ValueError, match=rf"over ranks \[0, 1\], and .* also has \[{other}\]"):
        hbmcomm.OuterSteps(model, adam(model), every=1)
    assert mesh_of(dist.group.WORLD).size() == 2


def test_the_ranks_of_a_mesh_are_refused(pool: Pool) -> None:
    pool.run(refuse_one_mesh)
