"""What DistributedDataParallel trains: the two ends between which real models lie."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Model:
    name: str
    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]


def _layers(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


MODELS = {
    model.name: model
    for model in (
        Model(
            "communication-bound",
            "6 linear layers of 2048 x 2048 (25 M parameters), a batch of 1",
            lambda: _layers(6, 2048),
            lambda: torch.randn(1, 2048),
        ),
        Model(
            "compute-bound",
            "8 linear layers of 512 x 512 (2 M parameters), a batch of 512",
            lambda: _layers(8, 512),
            lambda: torch.randn(512, 512),
        ),
    )
}
