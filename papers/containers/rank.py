"""A rank that times collectives: python -m papers.containers.rank PLAN.json

PLAN.json has "series", a name in SERIES; "dtype", a name in DTYPES; "collectives", with their names
and bytes; and "calls". Rank 0 writes the seconds of each call, on its slowest rank, to the file
RESULTS in the same directory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.collectives.mpi_objects import MpiObjects
from benchmarks.collectives.native import MpiInPlace
from papers.containers.job import RESULTS
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.collectives import CONTENDERS
from torch_hbmcomm.bench.contenders import Contender
from torch_hbmcomm.bench.mpich import Mpich

COLLECTIVES = ("broadcast", "gather", "allreduce")
HBM = "hbm"
MPI: dict[str, Contender] = {
    one.name: one for one in (CONTENDERS["hbm-mpi"], MpiInPlace(), Mpich(), MpiObjects())
}
SERIES = {HBM: "hbm, on plain tensors", **{name: one.about for name, one in MPI.items()}}
DTYPES = Mpich.dtypes
_WARM = 2  # uncounted calls


class Call:
    """A collective on plain tensors, with a check of its result.

    size: in bytes; in a gather, the size of each rank's part.
    """

    def __init__(self, collective: str, size: int, dtype: str) -> None:
        self._collective = collective
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        element: torch.dtype = getattr(torch, dtype)
        self._mine = torch.empty(size // element.itemsize, dtype=element)
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


def by_hbm(collective: str, size: int, dtype: str, calls: int) -> list[float]:
    call = Call(collective, size, dtype)
    return [seconds_of(call) for _ in range(_WARM + calls)][_WARM:]


def by_mpi(contender: Contender, collective: str, size: int, dtype: str, calls: int) -> list[float]:
    """Time calls that follow one another without a barrier, as benchmarks.collectives does."""
    ranks = dist.get_world_size()
    whole = size * ranks if collective == "gather" else size
    loop = contender.prepare(collective, Buffers(torch.empty, whole, dtype, ranks))
    slowest = torch.tensor(loop(calls, 1), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [microseconds / 1e6 for microseconds in slowest.tolist()]


def measured(
    series: str, dtype: str, collectives: list[tuple[str, int]], calls: int
) -> Iterator[list[float]]:
    """Yield the seconds of each collective's calls, on their slowest rank."""
    if series == HBM:
        yield from (by_hbm(collective, size, dtype, calls) for collective, size in collectives)
        return
    contender = MPI[series]
    contender.open()
    yield from (by_mpi(contender, *collective, dtype, calls) for collective in collectives)


def main(file: Path) -> None:
    plan = json.loads(file.read_text())
    tempfile.tempdir = str(file.parent)  # the native programs of all containers meet here
    torch.set_num_threads(1)
    dist.init_process_group(
        "hbm",
        init_method=f"file://{file.with_name('store')}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    found = list(measured(**plan))
    if dist.get_rank() == 0:
        file.with_name(RESULTS).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
