"""A rank whose steps only communicate: DistributedDataParallel with a chosen hook."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from papers.layer_drop.hooks import BUCKET_MIB, register
from papers.layer_drop.resnet50 import resnet50
from papers.layer_drop.synthetic import Synthetic
from torch_hbmcomm.bench.peer import obey


class Trainee:
    """A rank that has one model at a time, from prepare() to release()."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        warnings.simplefilter("ignore", FutureWarning)  # DDP warns of its own arguments

    def join(self, store_file: str, world: int, width: int, threads: int = 1) -> None:
        """Join the process group.

        store_file: path of a new file, equal on all ranks.
        width: channels of ResNet-50's first stage.
        """
        torch.set_num_threads(threads)
        dist.init_process_group(
            "hbm", init_method=f"file://{store_file}", rank=self._rank, world_size=world
        )
        self._world = dist.group.WORLD
        self._gloo = dist.new_group(backend="gloo")
        alone = [dist.new_group([rank]) for rank in range(world)]
        self._alone = alone[self._rank]
        self._model = Synthetic(resnet50(width), self._rank)

    def prepare(self, hook: str, terms: dict[str, Any], gloo: bool, alone: bool = False) -> None:
        """Make a model with a hook. alone: True uses a group of one rank, without communication."""
        group = self._alone if alone else self._gloo if gloo else self._world
        self._replica = DistributedDataParallel(
            self._model,
            process_group=group,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            init_sync=False,  # all ranks' models are equal
            bucket_cap_mb=BUCKET_MIB.get(hook),
        )
        self._state = register(self._replica, hook, terms)

    def train(self, steps: int) -> list[float]:
        """Take steps, and return the seconds of each."""
        times = []
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self._replica().backward()
            end = time.perf_counter()
            times.append(end - start)
            start = end
        return times

    def summary(self) -> dict[str, float] | None:
        return None if self._state is None else self._state.summary()

    def ranks(self) -> dict[str, int]:
        """Return the current rank of each matrix's approximation, by the parameter's name."""
        assert self._state is not None
        found: dict[str, int] = self._state.state_dict()["rule"]["ranks"]
        return {name.removeprefix("model."): rank for name, rank in found.items()}

    def size(self) -> int:
        """Return the bytes of all gradients."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def release(self) -> None:
        del self._replica, self._state


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Trainee(rank), rank)
