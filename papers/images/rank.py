"""A rank that trains a small convolutional net under DistributedDataParallel.

    python -m papers.images.rank PLAN.json

PLAN.json has "contenders", "rounds", and "steps", the number in a turn. Rank 0 writes the seconds
of each step, on its slowest rank and by contender, to the file RESULTS in the same directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from papers.containers.job import RESULTS

BATCH = 8  # images of one rank
ALONE = "no communication"
BACKENDS = {"hbm": "hbm", "gloo": "gloo", ALONE: "hbm"}


def network() -> nn.Module:
    """Make a net of 4 convolutions (1.2 million parameters) for images of 3 x 32 x 32."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 400), nn.ReLU(),
        nn.Linear(400, 10),
    )  # fmt: skip


class Training:
    """A training over a backend, or, for the contender ALONE, without communication."""

    def __init__(self, contender: str) -> None:
        self._exchanges = contender != ALONE
        torch.manual_seed(0)
        self._replica = DistributedDataParallel(
            network(),
            process_group=dist.new_group(backend=BACKENDS[contender]),
            gradient_as_bucket_view=True,
        )
        self._optimizer = torch.optim.SGD(self._replica.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(dist.get_rank())
        self._images, self._labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    def seconds(self, steps: int) -> list[float]:
        """Return the seconds of each step on its slowest rank, after one uncounted step."""
        taken = []
        for _ in range(1 + steps):
            dist.barrier()
            start = time.perf_counter()
            self._step()
            taken.append(time.perf_counter() - start)
        slowest = torch.tensor(taken[1:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found: list[float] = slowest.tolist()
        return found

    def _step(self) -> None:
        self._optimizer.zero_grad()
        with nullcontext() if self._exchanges else self._replica.no_sync():
            cross_entropy(self._replica(self._images), self._labels).backward()
        self._optimizer.step()


def turns(contenders: Sequence[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Alternate the contenders. Return the seconds of their steps."""
    trainings = {name: Training(name) for name in contenders}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, training in trainings.items():
            found[name] += training.seconds(steps)
    return found


def main(file: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "hbm",
        init_method=f"file://{file.with_name('store')}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    found = turns(**json.loads(file.read_text()))
    if dist.get_rank() == 0:
        file.with_name(RESULTS).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
