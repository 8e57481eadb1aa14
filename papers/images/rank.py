"""A rank that trains AlexNet under DistributedDataParallel, and reduces its gradients by MPI in C.

    python -m papers.images.rank PLAN.json

PLAN.json has "contenders", "rounds", and "steps", the number in a turn. Rank 0 writes the file
RESULTS in the same directory. It has "seconds", by contender, of each step on its slowest rank, and
"buckets", the bytes of each of DDP's buckets.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collectives.native import MpiInC
from papers.containers.job import RESULTS
from papers.images.alexnet import CLASSES, SHAPE, alexnet
from torch_hbmcomm.bench.buffers import Buffers

BATCH = 8  # images of one rank
HBM, GLOO = "hbm", "gloo"
ALONE = "no communication"
MPI = MpiInC.name
CONTENDERS = {
    HBM: "DistributedDataParallel over hbm",
    GLOO: "DistributedDataParallel over Gloo",
    ALONE: "the same steps without communication",
    MPI: "all_reduces of DDP's buckets in a program without Python, without training",
}


class Training:
    """A training over a backend.

    REQUIRES: a default group.
    """

    def __init__(self, backend: str) -> None:
        torch.manual_seed(0)
        self._replica = DistributedDataParallel(
            alexnet(), process_group=dist.new_group(backend=backend), gradient_as_bucket_view=True
        )
        self._optimizer = torch.optim.SGD(self._replica.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(dist.get_rank())
        self._images = torch.randn(BATCH, *SHAPE)
        self._labels = torch.randint(CLASSES, (BATCH,))

    def seconds(self, steps: int, exchanges: bool) -> list[float]:
        """Return this rank's seconds of each step, after one uncounted step.

        exchanges: False: the steps do not communicate.
        """
        taken = []
        for _ in range(1 + steps):
            dist.barrier()
            start = time.perf_counter()
            self._step(exchanges)
            taken.append(time.perf_counter() - start)
        return taken[1:]

    def buckets(self) -> list[int]:
        """Return the bytes of each of DDP's buckets, in the order of their all_reduces.

        REQUIRES: the last step communicated. DDP makes its final buckets in the second such step.
        """
        sizes: dict[int, int] = {}
        for parameter in reversed(list(self._replica.parameters())):
            assert parameter.grad is not None
            bucket = parameter.grad.untyped_storage().data_ptr()  # a gradient is a part of a bucket
            sizes[bucket] = sizes.get(bucket, 0) + parameter.grad.nbytes
        return list(sizes.values())

    def _step(self, exchanges: bool) -> None:
        self._optimizer.zero_grad()
        with nullcontext() if exchanges else self._replica.no_sync():
            cross_entropy(self._replica(self._images), self._labels).backward()
        self._optimizer.step()


def by_mpi(buckets: Sequence[int], steps: int) -> list[float]:
    """Return this rank's seconds of the all_reduces of one step, as often as `steps` says.

    All ranks call it.
    """
    mpi, ranks = MpiInC(), dist.get_world_size()
    of_buckets = [
        mpi.prepare("allreduce", Buffers(torch.empty, size, "float32", ranks))(steps, 1)
        for size in buckets
    ]
    return [sum(microseconds) / 1e6 for microseconds in zip(*of_buckets, strict=True)]


def turns(contenders: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Alternate the contenders. Return the content of RESULTS.

    contenders: HBM and others.
    """
    trainings = {name: Training(name) for name in (HBM, GLOO) if name in contenders}
    buckets: list[int] = []
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in contenders:
            if name == MPI:
                taken = by_mpi(buckets, steps)
            else:
                taken = trainings.get(name, trainings[HBM]).seconds(steps, name != ALONE)
            if name == HBM:
                buckets = trainings[HBM].buckets()
            slowest = torch.tensor(taken, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name] += slowest.tolist()
    return {"seconds": found, "buckets": buckets}


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
