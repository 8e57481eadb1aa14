"""A contender that is fast because it does nothing is found out before it is timed."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.collectives import NATIVE, Cell
from torch_hbmcomm.bench.contender import Loop


def check(cell: Cell, loop: Loop, buffers: Buffers) -> None:
    """Runs it once where each rank's buffers hold its rank + 1. All ranks call it.

    Raises RuntimeError for a wrong outcome; otherwise leaves zeros.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    buffers.fill(rank + 1)
    dist.barrier()
    loop(1)
    for tensor, value in _EXPECTED[cell.collective](buffers, rank, ranks):
        if not torch.all(tensor == value):
            raise RuntimeError(f"wrong outcome: {tensor.flatten()[:4].tolist()} for {value}")
    dist.barrier()
    buffers.fill(0)


Expected = list[tuple[torch.Tensor, int]]


def _sum(ranks: int) -> int:
    return ranks * (ranks + 1) // 2


def _from_each(buffers: Buffers) -> Expected:
    return [(share, rank + 1) for rank, share in enumerate(buffers.shares())]


def _on_root(rank: int, expected: Expected) -> Expected:
    return expected if rank == 0 else []


_EXPECTED: dict[str, Callable[[Buffers, int, int], Expected]] = {
    "allreduce": lambda buffers, rank, ranks: [(buffers.whole, _sum(ranks))],
    NATIVE: lambda buffers, rank, ranks: [(buffers.whole, _sum(ranks))],
    "broadcast": lambda buffers, rank, ranks: [(buffers.whole, 1)],
    "reduce": lambda buffers, rank, ranks: _on_root(rank, [(buffers.whole, _sum(ranks))]),
    "allgather": lambda buffers, rank, ranks: _from_each(buffers),
    "gather": lambda buffers, rank, ranks: _on_root(rank, _from_each(buffers)),
    "scatter": lambda buffers, rank, ranks: [(buffers.share, 1)],
    "reduce_scatter": lambda buffers, rank, ranks: [(buffers.share, _sum(ranks))],
    "alltoall": lambda buffers, rank, ranks: _from_each(buffers),
    "barrier": lambda buffers, rank, ranks: [],
    "sendrecv": lambda buffers, rank, ranks: [(buffers.whole, rank - rank % 2 + 1)],
}
