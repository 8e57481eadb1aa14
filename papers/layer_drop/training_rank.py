"""A rank that learns handwritten digits under DistributedDataParallel."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from papers.digits import Digits
from papers.layer_drop.hooks import BUCKET_MIB, register
from torch_hbmcomm.bench.peer import obey

_RATE = 0.1
_WIDTH, _HIDDEN = 512, 4  # 4 layers of 1 MiB, and two small ones


class Learner:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        warnings.simplefilter("ignore", FutureWarning)  # DDP warns of its own arguments

    def join(self, store_file: str, world: int, batch: int) -> None:
        """Join the process group.

        store_file: path of a new file, equal on all ranks.
        batch: images of this rank in a step.
        """
        torch.set_num_threads(1)
        dist.init_process_group(
            "hbm", init_method=f"file://{store_file}", rank=self._rank, world_size=world
        )
        self._digits = Digits(self._rank, world, batch)

    def prepare(self, hook: str, terms: dict[str, Any], epochs: int, seed: int) -> int:
        """Make a model with a hook. Returns the steps of an epoch."""
        torch.manual_seed(seed)
        self._shuffling = torch.Generator().manual_seed(seed)
        self._replica = DistributedDataParallel(
            _network(), gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB.get(hook)
        )
        register(self._replica, hook, terms)
        self._optimizer = torch.optim.SGD(self._replica.parameters(), lr=_RATE)
        total = epochs * self._digits.steps
        self._schedule = OneCycleLR(self._optimizer, _RATE, total_steps=total, cycle_momentum=False)
        return self._digits.steps

    def epoch(self) -> tuple[float, float]:
        """Train for an epoch. Returns its seconds, and the mean loss."""
        losses = []
        dist.barrier()
        start = time.perf_counter()
        for images, labels in self._digits.batches(self._shuffling):
            self._optimizer.zero_grad()
            loss = cross_entropy(self._replica(images), labels)
            loss.backward()
            self._optimizer.step()
            self._schedule.step()
            losses.append(float(loss.detach()))
        return time.perf_counter() - start, statistics.fmean(losses)

    def accuracy(self) -> float:
        return self._digits.accuracy(self._replica.module)


def _network() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), _linear(64, _WIDTH), nn.ReLU()]
    for _ in range(_HIDDEN):
        layers += [_linear(_WIDTH, _WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, _linear(_WIDTH, 10))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(
        layer.weight, nonlinearity="relu"
    )  # with the default, a net of this depth would not learn
    nn.init.zeros_(layer.bias)
    return layer


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Learner(rank), rank)
