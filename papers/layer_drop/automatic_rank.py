"""A rank that trains a perceptron under DistributedDataParallel, plainly or with ratio="auto"."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from papers.layer_drop.hooks import register
from torch_hbmcomm.bench.peer import obey

_HIDDEN = 6


class Runner:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def join(self, store_file: str, world: int, width: int, batch: int) -> None:
        """Join the process group.

        store_file: path of a new file, equal on all ranks.
        width: inputs and outputs of a layer. batch: samples of this rank in a step.
        """
        torch.set_num_threads(1)
        dist.init_process_group(
            "hbm", init_method=f"file://{store_file}", rank=self._rank, world_size=world
        )
        draw = torch.Generator().manual_seed(self._rank)
        self._width = width
        self._inputs = torch.randn(batch, width, generator=draw)
        self._classes = torch.randint(width, (batch,), generator=draw)

    def train(self, hook: str | None, steps: int) -> tuple[float, float]:
        """Train a new model. Returns the seconds of all steps, and the chosen ratio.

        hook: "low_rank" or "layer_drop", with ratio="auto"; None: plain DDP
        """
        torch.manual_seed(0)
        layers = [(nn.Linear(self._width, self._width), nn.ReLU()) for _ in range(_HIDDEN)]
        replica = DistributedDataParallel(nn.Sequential(*(one for pair in layers for one in pair)))
        state = register(replica, hook or "none", {"ratio": "auto"})
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(replica(self._inputs), self._classes).backward()
            optimizer.step()
        dist.barrier()
        seconds = time.perf_counter() - start
        return seconds, 0.0 if state is None else state.summary()["chosen_ratio"]


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Runner(rank), rank)
