"""A small model, its training, and functional collectives, for any group and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from harness.context import Context

WIDTH = 24
STEPS = 4


class Net(nn.Module):
    """A model of three layers. If `sometimes`, only every other call uses `second`."""

    def __init__(self, sometimes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.third = nn.Linear(4 * WIDTH, WIDTH)
        self.sometimes = sometimes
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.first(inputs))
        if not self.sometimes or self.calls % 2:
            hidden = torch.tanh(self.second(hidden))
        out: torch.Tensor = self.third(hidden)
        return out


def net(**options: Any) -> Net:
    torch.manual_seed(7)
    return Net(**options)


def batch(context: Context, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's data of a step. Equal seeds give equal data."""
    generator = torch.Generator().manual_seed(context.seed + 100 * step + context.rank)
    inputs = torch.randn(8, WIDTH, generator=generator)
    return inputs, torch.randn(8, WIDTH, generator=generator)


def loss_of(
    model: Callable[..., Any],
    context: Context,
    step: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    inputs, targets = (each.to(device) for each in batch(context, step))
    return nn.functional.mse_loss(model(inputs).float(), targets)


def train(model: nn.Module, context: Context, steps: int = STEPS) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    device = next(model.parameters()).device
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, context, step, device).backward()
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def mesh_of(group: dist.ProcessGroup, device: str = "cpu") -> DeviceMesh:
    return DeviceMesh.from_group(group, device)


def sharded(
    group: dist.ProcessGroup, model: nn.Module, device: str = "cpu", **options: Any
) -> nn.Module:
    return fully_sharded(mesh_of(group, device), model, **options)


def fully_sharded(mesh: DeviceMesh, model: nn.Module, **options: Any) -> nn.Module:
    """Shard each layer, and the model, by FSDP2."""
    for layer in list(model.children()):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def collectives(data: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Call functional collectives and other operations, in a form that torch.compile accepts."""
    total = funcol.all_reduce(data, "sum", group)
    largest = funcol.all_reduce(data * 2, "max", group)
    gathered = funcol.all_gather_tensor(data, 0, group)
    part = funcol.reduce_scatter_tensor(gathered, "sum", 0, group)
    exchanged = funcol.all_to_all_single(gathered, None, None, group)
    copy = funcol.broadcast(data, 0, group)
    return [total + 1, largest, gathered * 2, part, exchanged, copy]
