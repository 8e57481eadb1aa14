"""The synchronous parameter server on ranks of a pool: models, optimizers, and a reference.

Buckets are small, unless a test says otherwise, so that parameters share buckets, end in the middle
of a bucket, and span several buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.context import BACKEND, Context
from harness.data import assert_same, gathered
from torch_hbmcomm.parameter_server import SyncParameterServer, sync_channel

SAMPLES = 12  # of all workers in a step; every number of workers divides it
INPUTS = 7
STEPS = 4
BUCKET_BYTES = 256

Optimize = Callable[[Any], torch.optim.Optimizer]
GROUPS = [BACKEND] if BACKEND == "gloo" else [BACKEND, "gloo"]


class Uneven(nn.Module):
    """A model with parameters of many sizes, among them 0, 1 and 31 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 31)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.second = nn.Linear(31, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs)) * self.scale
        out: torch.Tensor = self.second(hidden) + self.empty.sum()
        return out


def model_of(
    make: Callable[[], nn.Module] = Uneven, dtype: torch.dtype = torch.float32
) -> nn.Module:
    torch.manual_seed(11)
    return make().to(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Make Adam with a large eps, so that rounding of the gradients changes a step little.

    The first step is lr * g / (|g| + eps). If a batch is divided among workers in another way, its
    gradient g differs in the last bits. With the usual eps, 1e-8, such a difference in a gradient
    near 0 changes the step by up to 2 lr. With this eps, the step changes by at most lr / eps = 1
    times the difference.
    """
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=0.01)


def samples(context: Context, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(context.seed + step)
    inputs = torch.randn(SAMPLES, INPUTS, generator=generator)
    return inputs, torch.randn(SAMPLES, 3, generator=generator)


def backward(
    model: nn.Module, context: Context, step: int, worker: int = 0, workers: int = 1
) -> None:
    """Compute the gradients of a worker's share of the samples."""
    dtype = next(model.parameters()).dtype
    inputs, targets = (part.chunk(workers)[worker].to(dtype) for part in samples(context, step))
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()


def alone(
    context: Context, model: nn.Module, optimize: Optimize, steps: int = STEPS
) -> list[torch.Tensor]:
    """Train the reference: one process, all samples."""
    optimizer = optimize(model.parameters())
    for step in range(steps):
        backward(model, context, step)
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def group_of(context: Context, name: str) -> dist.ProcessGroup | None:
    return context.gloo if name == "gloo" else None


@contextmanager
def buckets_of(size: int) -> Iterator[None]:
    usual = sync_channel.BUCKET_BYTES
    sync_channel.BUCKET_BYTES = size
    try:
        yield
    finally:
        sync_channel.BUCKET_BYTES = usual


def serve_or_work(
    ps: SyncParameterServer, context: Context, work: Callable[[int, int], None], **options: Any
) -> None:
    """Serve on a dedicated server's rank. On a worker, call work(worker, workers). Then close."""
    dedicated, rank = options.get("dedicated", False), options.get("server", 0)
    if dedicated and context.rank == rank:
        ps.serve()
    else:
        worker = context.rank - (dedicated and context.rank > rank)
        work(worker, context.size - dedicated)
    ps.close()


def make(
    context: Context,
    model: nn.Module,
    optimize: Optimize = sgd,
    bucket_bytes: int = BUCKET_BYTES,
    **options: Any,
) -> SyncParameterServer:
    """Make a parameter server, with an optimizer on the server's rank alone.

    options: the options of SyncParameterServer.
    """
    optimizer = optimize(model.parameters()) if context.rank == options.get("server", 0) else None
    with buckets_of(bucket_bytes):
        return SyncParameterServer(model, optimizer, **options)


def assert_close(mine: list[torch.Tensor], other: list[torch.Tensor], tolerance: float) -> None:
    for index, (one, two) in enumerate(zip(mine, other, strict=True)):
        torch.testing.assert_close(
            one, two, rtol=tolerance, atol=tolerance, msg=partial("tensor {}: {}".format, index)
        )


def assert_replicated(context: Context, tensors: list[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        for rank, other in enumerate(gathered(context, tensor)):
            assert_same(other, tensor, f"tensor {index} of rank {rank} against {context.rank}")


def raised(
    kind: type[Exception], function: Callable[..., object], *arguments: Any, **options: Any
) -> str:
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    return str(caught.value)
