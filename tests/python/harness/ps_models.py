"""Models of the parameter server's tests.

Their updates are whole numbers, so that sums are exact in every order of addition.
"""

from __future__ import annotations

import torch
from torch import nn

LEAST_SHARD_BYTES = 1 << 10  # bytes: many shards in a small model


class Awkward(nn.Module):
    """A model with a tensor of every kind that needs care in the layout of shards."""

    count: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.single = nn.Parameter(torch.zeros(()))
        self.prime = nn.Parameter(torch.zeros(97))
        self.matrix = nn.Parameter(torch.zeros(13, 7))
        self.transposed = nn.Parameter(torch.zeros(5, 11).t())
        self.images = nn.Parameter(
            torch.zeros(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        )
        self.one_more = nn.Parameter(torch.zeros(LEAST_SHARD_BYTES // 4 + 1))
        self.long = nn.Parameter(torch.zeros(3 * LEAST_SHARD_BYTES + 5))
        self.wide = nn.Parameter(torch.zeros(301, dtype=torch.float64))
        self.brain = nn.Parameter(torch.zeros(43, dtype=torch.bfloat16))
        self.narrow = nn.Parameter(torch.zeros(5, 5, dtype=torch.float16))
        self.tied = self.prime
        self.frozen = nn.Parameter(torch.full((17,), 3.0), requires_grad=False)
        self.idle = nn.Parameter(torch.full((19,), 5.0))
        self.register_buffer("statistic", torch.zeros(3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))


def whole_gradients(model: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Set and return gradients of whole numbers, whose sums are exact in every type.

    The parameter "idle" and frozen parameters get no gradient.
    """
    given = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name != "idle":
            numbers = torch.randint(-3, 4, parameter.shape, generator=generator)
            gradient = torch.empty_like(parameter.detach()).copy_(numbers)
            parameter.grad = given[name] = gradient
    return given


def summed(
    totals: list[dict[str, torch.Tensor]], into: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights `into` after plain SGD at a rate of 1 with the gradients `totals`."""
    result = {name: value.clone() for name, value in into.items()}
    for total in totals:
        for name, value in total.items():
            result[name] -= value
    return result


class Cells(nn.Module):
    """Worker i adds 1 to cell i in each step, so the weights show each worker's steps."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(count))

    def add_one(self, worker: int) -> None:
        self.cells.grad = torch.zeros_like(self.cells)
        self.cells.grad[worker] = -1

    def seen(self) -> list[int]:
        return [int(cell) for cell in self.cells.tolist()]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{name} differs")
