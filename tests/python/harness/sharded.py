"""A model with given gradients, sharded within nodes, and its replicas on the other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import torch_hbmcomm as hbmcomm
from harness.context import Context
from harness.layer_drop_ddp import SHAPES, everyones
from torch_hbmcomm.tensors import local_part

BLOCKS = 3
NODES = {1: 1, 2: 2, 3: 1, 4: 2, 8: 2}  # by the number of ranks


class Block(nn.Module):
    """Adds its parameters to `total`, each weighted by an input. So inputs are gradients."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, total: torch.Tensor, *weights: torch.Tensor | None) -> torch.Tensor:
        for parameter, weight in zip(self.all, weights, strict=True):
            if weight is not None:
                total = total + (parameter * weight).sum()
        return total


class Blocks(nn.Module):
    """Blocks that share SHAPES. Some ranks' shards of some parameters are padded, or empty."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(SHAPES[i::BLOCKS], dtype) for i in range(BLOCKS))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, *weights: torch.Tensor | None) -> torch.Tensor:
        total = torch.zeros((), requires_grad=True)
        for index, block in enumerate(self.blocks):
            total = block(total, *weights[index::BLOCKS])
        return total


def name_of(index: int) -> str:
    """Return the name of the parameter that has SHAPES[index]."""
    return f"blocks.{index % BLOCKS}.all.{index // BLOCKS}"


def mesh_of(context: Context) -> DeviceMesh:
    nodes = NODES[context.size]
    return init_device_mesh(
        "cpu", (nodes, context.size // nodes), mesh_dim_names=("nodes", "shards")
    )


def sharded(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> Any:
    """Return the model, with each block sharded within a node."""
    made: Any = Blocks() if model is None else model
    for block in made.blocks:
        fully_shard(block, mesh=mesh["shards"], **options)
    fully_shard(made, mesh=mesh["shards"], **options)
    assert isinstance(made, FSDPModule)
    return made


def replicated(
    mesh: DeviceMesh, kind: str = "low_rank", model: nn.Module | None = None, **settings: Any
) -> tuple[Any, Any]:
    """Return a sharded model and its state. kind: "low_rank" or the target of layer dropping.

    settings: arguments of the configuration, and `optimizer` and `scaler`.
    """
    options = {name: settings.pop(name) for name in ("optimizer", "scaler") if name in settings}
    config: Any = (
        hbmcomm.LowRank(**settings)
        if kind == "low_rank"
        else (
            hbmcomm.LayerDrop(target=kind, **settings)  # type: ignore[arg-type]
        )
    )
    made = sharded(mesh) if model is None else model
    return made, hbmcomm.replicate_shards(made, config, replicas=mesh.get_group("nodes"), **options)


def backward(model: nn.Module, weights: Sequence[torch.Tensor | None]) -> None:
    model.zero_grad()
    model(*weights).backward()


def shards_of(mesh: DeviceMesh, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's shard of each tensor, as FSDP2 cuts them."""
    count, own = mesh["shards"].size(), mesh["shards"].get_local_rank()
    parts = [one.chunk(count) for one in tensors]
    return [one[own] if own < len(one) else one[0][:0] for one in parts]


def means(context: Context, step: int) -> list[torch.Tensor]:
    """Return the mean of all ranks' gradients of a step, by parameter."""
    of_ranks = everyones(context, step)
    return [torch.stack([own[i] for own in of_ranks]).mean(0) for i in range(len(SHAPES))]


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's shard of each gradient."""
    parameters = dict(model.named_parameters())
    found = []
    for index in range(len(SHAPES)):
        parameter = parameters[name_of(index)]
        gradient = local_part(parameter).new_zeros(local_part(parameter).shape)
        found.append(gradient if parameter.grad is None else local_part(parameter.grad))
    return found


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """Return a copy of this rank's shard of each parameter."""
    parameters = dict(model.named_parameters())
    return [local_part(parameters[name_of(index)]).detach().clone() for index in range(len(SHAPES))]


def mean_residuals(mesh: DeviceMesh, state: Any, model: nn.Module) -> list[torch.Tensor]:
    """Return the mean over the replicas of this rank's residuals."""
    residuals = state.state_dict()["caches"]
    found = []
    for index, like in enumerate(values_of(model)):
        total = residuals.get(name_of(index), torch.zeros_like(like))
        if total.numel():
            dist.all_reduce(total, group=mesh.get_group("nodes"))
        found.append(total / mesh["nodes"].size())
    return found


def assert_replicas_equal(mesh: DeviceMesh, model: nn.Module) -> None:
    for one in values_of(model):
        if one.numel():
            low, high = one.clone(), one.clone()
            dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh.get_group("nodes"))
            dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh.get_group("nodes"))
            assert torch.equal(low, high)
