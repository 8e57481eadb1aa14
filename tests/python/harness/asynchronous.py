"""Training with async_hook on ranks of a pool.

Gradients are whole numbers, so that their sums are exact in every order of addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from harness import beyond_gloo
from harness.box_process import TOKEN
from harness.data import assert_same
from torch_hbmcomm import smb

MARKS = [
    beyond_gloo,
    pytest.mark.ranks(1, 2, 3, 4),
    pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning"),
]
SHAPES = [(70,), (310, 70), (3, 5, 7), (1,), (90, 90), (40000,)]
STEPS = 12


@contextmanager
def two_boxes(lease: float = 30.0) -> Iterator[list[str]]:
    with ExitStack() as servers:
        yield [
            servers.enter_context(smb.Server(memory="64MiB", token=TOKEN, lease=lease)).url
            for _ in range(2)
        ]


class Weighted(nn.Module):
    """A model that returns the sum of its parameters, weighted by its inputs.

    So the inputs are the gradients of the parameters.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, *weights: torch.Tensor) -> torch.Tensor:
        # Use the parameters in an order that is not their own, so that DDP rebuilds its buckets.
        order = sorted(range(len(SHAPES)), key=lambda index: index % 3)
        return torch.stack([(self.all[i] * weights[i]).sum() for i in order]).sum()


def gradients(seed: int, rank: int, step: int, size: int) -> list[torch.Tensor]:
    """Return whole numbers, whose means over the ranks are whole numbers too."""
    draw = torch.Generator().manual_seed(seed + 1000 * step + rank)
    return [torch.randint(-9, 10, shape, generator=draw) * float(size) for shape in SHAPES]


def applied_to_zero(seed: int, size: int, steps: Callable[[int], int]) -> list[torch.Tensor]:
    """Return zeros after SGD at a rate of 1, with the gradients of all ranks, divided by `size`.

    steps: a function that returns the number of steps of a rank
    """
    found = [torch.zeros(shape) for shape in SHAPES]
    for rank in range(size):
        for step in range(steps(rank)):
            for total, gradient in zip(found, gradients(seed, rank, step, size), strict=True):
                total -= gradient / size
    return found


def connections(resources: ExitStack, urls: list[str], transport: Any) -> list[smb.Box]:
    return [resources.enter_context(smb.connect(url, TOKEN, transport)) for url in urls]


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    options = {"broadcast_buffers": False, "bucket_cap_mb": 0.05} | options
    return DistributedDataParallel(model, **options)


@contextmanager
def hooked(
    urls: list[str],
    transport: str = "auto",
    ddp_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[Weighted, DistributedDataParallel, torch.optim.SGD, hbmcomm.AsyncState]]:
    """Yield a model, its DDP with async_hook, SGD at a rate of 1, and the hook's state.

    options: the options of AsyncState.
    """
    with ExitStack() as resources:
        model = Weighted()
        ddp = wrapped(model, **ddp_options or {})
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        boxes = connections(resources, urls, transport)
        state = resources.enter_context(hbmcomm.AsyncState(None, ddp, boxes, **options))
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        yield model, ddp, optimizer, state


def check_weights(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for index, (found, wanted) in enumerate(zip(model.parameters(), expected, strict=True)):
        assert_same(found.detach(), wanted, f"parameter {index}")


def steps_of(rank: int) -> int:
    return STEPS + 3 * rank


def net() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
