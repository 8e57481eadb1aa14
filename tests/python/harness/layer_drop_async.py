"""Workers of the asynchronous parameter server that drop layers of a small model.

Workers are threads, or take turns in one thread. Updates are whole numbers, so that their sums are
exact in every order of addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import torch_hbmcomm as hbmcomm
from harness.ps_task import weights
from harness.ps_workers import Boxes, exchanging, parameter_server
from torch_hbmcomm.parameter_server import Downpour, ParameterServer
from torch_hbmcomm.parameter_server.packing import packed_ranges

TINY_SHARD_BYTES = 1 << 8  # bytes: several shards in each layer
NEVER = 1e9  # a threshold that nothing reaches
TRANSPORTS = ["shm", "tcp"]

Weights = Mapping[str, torch.Tensor]


def drop(**options: Any) -> hbmcomm.LayerDrop:
    return hbmcomm.LayerDrop(**{"min_numel": 16, "max_age": 6, **options})


class Layered(nn.Module):
    """Layers of several sizes and types, and parameters that are always sent."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(31, 11))
        self.norm = nn.BatchNorm1d(5)
        self.first = nn.Linear(13, 7)
        self.second = nn.Linear(7, 9)
        self.exact = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
        self.untrained = nn.Parameter(torch.zeros(6, 6))
        self.frozen = nn.Parameter(torch.zeros(5, 5), requires_grad=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def give(self, name: str, gradient: float) -> None:
        """Set every element's gradient. SGD at a rate of 1 then subtracts it."""
        parameter = self.get_parameter(name)
        parameter.grad = torch.full_like(parameter, gradient)

    def give_random(self, generator: torch.Generator) -> Weights:
        """Set random gradients, and return the updates that SGD at a rate of 1 makes of them.

        The gradients are whole numbers, whose range differs between layers and steps. Some layers
        get none.
        """
        given = {}
        for name, parameter in self.named_parameters():
            parameter.grad = None
            size = int(torch.randint(0, 40, (), generator=generator))
            if parameter.requires_grad and name != "untrained" and size:
                numbers = torch.randint(-size, size + 1, parameter.shape, generator=generator)
                parameter.grad = numbers.to(parameter.dtype)
                given[name] = -parameter.grad
        return given


def waiting(ps: ParameterServer, model: nn.Module) -> Weights:
    """Return a worker's unsent updates: model - base, plus the rounding errors of sent deltas."""
    worker = exchanging(ps)
    worker.wait_for_exchange()
    trained = worker._replica.locate()
    ahead = {name: torch.zeros_like(value) for name, value in weights(model).items()}
    for shard, part in worker._replica._parts.items():
        for span, inside in packed_ranges(shard.spans):
            name = ps._plan.layout.tensors[span.tensor].name
            if name in ahead:
                at = slice(span.start, span.stop)
                own = trained[span.tensor].detach().flatten()[at]
                ahead[name].flatten()[at] = own - part.base[inside]
                if part.rest is not None:
                    ahead[name].flatten()[at] += part.rest[inside]
    return ahead


def total(parts: list[Weights]) -> dict[str, torch.Tensor]:
    result = weights(Layered())
    for part in parts:
        for name, value in part.items():
            result[name] += value
    return result


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{name} differs")


def in_box(boxes: Boxes, **options: Any) -> Weights:
    """Return the weights in the boxes, by joining as a further worker."""
    model = Layered()
    with parameter_server(boxes, model, rule=Downpour("sum"), **options):
        return weights(model)
