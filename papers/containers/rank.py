"""A rank that times collectives: python -m papers.containers.rank PLAN.json

PLAN.json has "collectives", with their names and bytes, and "calls". Rank 0 writes the seconds of
each call, on its slowest rank, to the file RESULTS in the same directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from papers.containers.job import RESULTS

COLLECTIVES = ("broadcast", "gather", "allreduce")
_WARM = 2  # uncounted calls


class Call:
    """A collective on plain tensors of float32, with a check of its result.

    size: in bytes; in a gather, the size of each rank's part.
    """

    def __init__(self, collective: str, size: int) -> None:
        self._collective = collective
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._mine = torch.empty(size // 4)
        self._parts: list[torch.Tensor] = []
        if collective == "gather" and self._rank == 0:
            self._parts = [torch.empty_like(self._mine) for _ in range(self._ranks)]

    def prepare(self) -> None:
        self._mine.fill_(self._rank + 1)
        for part in self._parts:
            part.fill_(0)

    def run(self) -> None:
        if self._collective == "broadcast":
            dist.broadcast(self._mine, 0)
        elif self._collective == "gather":
            dist.gather(self._mine, self._parts or None, 0)
        else:
            dist.all_reduce(self._mine)

    def check(self) -> None:
        total = self._ranks * (self._ranks + 1) // 2
        mine = {"broadcast": 1, "gather": self._rank + 1, "allreduce": total}[self._collective]
        good = bool((self._mine == mine).all()) and all(
            bool((part == rank + 1).all()) for rank, part in enumerate(self._parts)
        )
        if not good:
            raise RuntimeError(f"rank {self._rank}: the result of {self._collective} is wrong")


def seconds_of(call: Call) -> float:
    """Return the seconds of a call on the slowest rank."""
    call.prepare()
    dist.barrier()
    begin = time.perf_counter()
    call.run()
    slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    call.check()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def main(file: Path) -> None:
    plan = json.loads(file.read_text())
    torch.set_num_threads(1)
    dist.init_process_group(
        "hbm",
        init_method=f"file://{file.with_name('store')}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    found = []
    for collective, size in plan["collectives"]:
        call = Call(collective, size)
        found.append([seconds_of(call) for _ in range(_WARM + plan["calls"])][_WARM:])
    if dist.get_rank() == 0:
        file.with_name(RESULTS).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
