"""With each hook of the library, a compiled step of an optimizer equals the uncompiled step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_hbmcomm.error_feedback.optimizer import UpdateSkipper
from torch_hbmcomm.layer_drop.optimizer import CatchUp
from torch_hbmcomm.layer_drop.rows import Rows
from torch_hbmcomm.low_rank.optimizer import MomentumDamper, SecondMomentCorrector
from torch_hbmcomm.low_rank.ranks import matrix_of
from torch_hbmcomm.parameter_server.own_steps import OwnSteps
from torch_hbmcomm.tensors import memory_shape

STEPS = 3
Optimizer = torch.optim.Optimizer


class Damping:
    def __init__(self, _: Optimizer) -> None:
        self.hook = MomentumDamper(0.5)

    def prepare(self, step: int, parameters: list[nn.Parameter]) -> None:
        self.hook.clear()
        for parameter in parameters:
            shape = memory_shape(parameter)
            matrix = matrix_of("one", shape, 4) if len(shape) > 1 else None
            if matrix is not None:
                columns = torch.randn(matrix.rows, 1 + step % 2)
                self.hook.add(parameter, matrix, torch.linalg.qr(columns).Q)


class Mending:
    def __init__(self, _: Optimizer) -> None:
        self.hook = SecondMomentCorrector()

    def prepare(self, step: int, parameters: list[nn.Parameter]) -> None:
        for index, parameter in enumerate(parameters):
            self.hook.add(parameter, 1 / (1 + step + index))


class Skipping:
    def __init__(self, optimizer: Optimizer | None) -> None:
        self.hook = UpdateSkipper(None if optimizer is None else [optimizer])

    def prepare(self, step: int, parameters: list[nn.Parameter]) -> None:
        self.hook.dropped = [*parameters[step % len(parameters) :]]


class CatchingUp:
    def __init__(self, _: Optimizer) -> None:
        self.hook = CatchUp()

    def prepare(self, step: int, parameters: list[nn.Parameter]) -> None:
        self.hook.clear()
        for parameter in parameters:
            rows = Rows(torch.arange(step, 4), parameter.numel(), -(-parameter.numel() // 4))
            self.hook.add(parameter, rows, torch.arange(4 - step) + 1.0)


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def adam(parameters: Any) -> Optimizer:
    # With these betas the bias corrections are exact in the compiled step's float32.
    return torch.optim.AdamW(parameters, lr=0.1, betas=(0.5, 0.75))


HOOKS: dict[str, tuple[Callable[..., Optimizer], Callable[[Optimizer], Any]]] = {
    "damper": (momentum, Damping),
    "corrector": (adam, Mending),
    "blocks": (momentum, CatchingUp),
    "blocks, Adam": (adam, CatchingUp),
    "skipper": (momentum, Skipping),
    "skipper of all": (momentum, lambda _: Skipping(None)),
}


def trained(name: str, backend: str | None) -> list[torch.Tensor]:
    """Train. The hooks are added after the first step, when the step has been compiled."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(20, 30), nn.Conv2d(8, 8, 3, bias=False)).double()
    parameters = list(model.parameters())
    make_optimizer, make_hook = HOOKS[name]
    optimizer = make_optimizer(parameters)

    def step() -> None:
        optimizer.step()

    run = step if backend is None else torch.compile(step, backend=backend)
    hook = None
    for number in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if number > 0:
            hook = hook or make_hook(optimizer)
            hook.prepare(number, parameters)
        run()
    return [parameter.detach() for parameter in parameters]


@pytest.fixture(autouse=True)
def forget() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_steps_equal_uncompiled_ones(name: str, backend: str) -> None:
    for found, expected in zip(trained(name, backend), trained(name, None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_compiled_step_is_refused_next_to_a_server() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = momentum([weight])
    steps = OwnSteps(optimizer)

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    for _ in range(3):
        weight.grad = torch.ones(3)
        with steps.allowed():
            step()
        before = weight.detach().clone()
        with pytest.raises(RuntimeError, match="under a parameter server"):
            step()
        assert torch.equal(weight.detach(), before)
    steps.release()
    step()
