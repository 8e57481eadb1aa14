"""An optimizer's step makes up for the steps that a block missed, and leaves blocks that wait."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.catch_up import RATE, Reference
from torch import nn

from torch_hbmcomm.layer_drop.optimizer import CatchUp
from torch_hbmcomm.layer_drop.rows import Rows

STEPS = 12
SIZE = 7
NUMEL = 5 * SIZE + 3  # the last block is shorter


def cut(values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.flatten().split(SIZE))


SETTINGS: list[dict[str, Any]] = [
    {"kind": torch.optim.AdamW},
    {"kind": torch.optim.AdamW, "fused": True, "weight_decay": 0.1},
    {"kind": torch.optim.AdamW, "foreach": True, "amsgrad": True, "maximize": True},
    {"kind": torch.optim.Adam, "weight_decay": 0.1},
    {"kind": torch.optim.SGD, "momentum": 0.9, "weight_decay": 0.1},
    {"kind": torch.optim.SGD, "momentum": 0.9, "dampening": 0.3, "maximize": True},
    {"kind": torch.optim.SGD, "momentum": 0.8, "nesterov": True},
    {"kind": torch.optim.SGD, "momentum": 0.0, "weight_decay": 0.1},
]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_blocks_make_up_for_the_steps_that_they_missed(number: int) -> None:
    """Each step sends some of the blocks, and sometimes none."""
    settings = SETTINGS[number]
    draw = torch.Generator().manual_seed(number)
    parameter = nn.Parameter(torch.randn(NUMEL // 2, 2, dtype=torch.float64, generator=draw))
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))  # has no blocks
    terms = {name: value for name, value in settings.items() if name != "kind"}
    optimizer = settings["kind"]([parameter, other], lr=RATE, **terms)
    hook = CatchUp([optimizer] if number % 2 else None)
    references = [Reference(one.clone(), settings) for one in cut(parameter.detach())]
    waiting, ages = torch.zeros_like(parameter), torch.zeros(len(references)).double()
    for step in range(1, STEPS + 1):
        waiting += torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
        ages += 1
        sent = torch.rand(len(references), generator=draw) < (0.0 if step % 5 == 3 else 0.4)
        sent |= torch.tensor(step == 1)  # as in the product, the moments begin with the training
        indices = sent.nonzero().flatten()
        rows = Rows(indices, parameter.numel(), SIZE)
        parameter.grad = torch.zeros_like(parameter)
        rows.put(parameter.grad.view(-1), rows.take(waiting.view(-1)))
        other.grad = torch.ones_like(other)
        given = parameter.grad
        hook.clear()
        hook.add(parameter, rows, ages[indices])
        for index in indices.tolist():
            references[index].catch_up(cut(waiting)[index].clone(), int(ages[index]), step)
        before = [one.clone() for one in cut(parameter.detach())]
        optimizer.step()
        assert parameter.grad is given
        for index, (found, old) in enumerate(zip(cut(parameter.detach()), before, strict=True)):
            expected = references[index].values if sent[index] else old
            rounding = 1e-9 if sent[index] else 0.0
            torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)
        rows.put(waiting.view(-1), torch.zeros(rows.numel, dtype=torch.float64))
        ages[indices] = 0
    assert not torch.equal(other.detach(), torch.ones(3))


def test_a_step_that_a_scaler_skips_changes_nothing() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    hook = CatchUp([optimizer])
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    state = {name: one.clone() for name, one in optimizer.state[parameter].items()}
    before = parameter.detach().clone()
    hook.add(parameter, Rows(torch.tensor([1, 2]), 16, 4), torch.tensor([3.0, 4.0]).double())
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(parameter.detach(), before)
    for name, one in optimizer.state[parameter].items():
        assert torch.equal(one, state[name]), name


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": torch.optim.AdamW},
        {"kind": torch.optim.SGD, "momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    ],
    ids=["AdamW", "SGD"],
)
def test_gradients_that_a_scaler_has_scaled_count_unscaled(settings: dict[str, Any]) -> None:
    found = []
    terms = {name: value for name, value in settings.items() if name != "kind"}
    for scale in (None, 1024.0):
        parameter = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        optimizer = settings["kind"]([parameter], lr=RATE, fused=True, **terms)
        hook = CatchUp([optimizer])
        for k in (1, 3, 2):
            hook.clear()
            rows = Rows(torch.tensor([1, 2]), 16, 4)
            hook.add(parameter, rows, torch.tensor([k, k]).double())
            parameter.grad = torch.zeros(4, 4)
            parameter.grad[1:3] = k
            if scale is not None:
                parameter.grad *= scale
                optimizer.found_inf = torch.tensor(0.0)
                optimizer.grad_scale = torch.tensor(scale)
            optimizer.step()
        found.append(parameter.detach())
    torch.testing.assert_close(*found)


def test_another_kind_of_optimizer_is_named() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.Adagrad([parameter])
    hook = CatchUp()
    hook.add(parameter, Rows(torch.tensor([1]), 16, 4), torch.tensor([3.0]).double())
    parameter.grad = torch.zeros(4, 4)
    optimizer.step()
    with pytest.warns(RuntimeWarning, match="no way to step single blocks with Adagrad"):
        hook.clear()


def test_gradients_come_back_after_a_step_that_raised() -> None:
    parameter, broken = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter, broken], lr=1.0, momentum=0.5, foreach=False)
    hook = CatchUp()
    hook.add(parameter, Rows(torch.tensor([1]), 16, 4), torch.tensor([3.0]).double())
    parameter.grad, broken.grad = torch.zeros(4, 4), torch.zeros(4)
    parameter.grad[1] = 3
    given = parameter.grad
    optimizer.state[broken]["momentum_buffer"] = torch.zeros(5)
    with pytest.raises(RuntimeError):
        optimizer.step()
    del optimizer.state[broken]["momentum_buffer"]
    optimizer.step()
    assert parameter.grad is given
    assert math.isclose(float(parameter.detach()[1, 0]), 1 - 3 * (1 + 0.5 + 0.25))
    assert torch.equal(parameter.detach()[0], torch.ones(4))


@pytest.mark.parametrize("numel", [1, 6, 7, 8, 20, 21])
def test_blocks_are_read_and_written_back(numel: int) -> None:
    values = torch.arange(1.0, numel + 1)
    parts = list(values.split(SIZE))
    for mask in range(2 ** len(parts)):
        chosen = [index for index in range(len(parts)) if mask >> index & 1]
        rows = Rows(torch.tensor(chosen, dtype=torch.long), numel, SIZE)
        expected = torch.cat([values[:0], *(parts[index] for index in chosen)])
        assert rows.numel == expected.numel()
        assert torch.equal(rows.take(values), expected)
        target = torch.zeros(numel)
        rows.put(target, -expected)
        assert torch.equal(target[target != 0], -expected)
        of_blocks = rows.spread(torch.tensor(chosen, dtype=torch.float32))
        lengths = torch.tensor([len(parts[index]) for index in chosen], dtype=torch.long)
        assert torch.equal(of_blocks, torch.tensor(chosen).float().repeat_interleave(lengths))
    norms = torch.stack([part.norm() for part in parts])
    torch.testing.assert_close(Rows.norms(values, SIZE), norms)
