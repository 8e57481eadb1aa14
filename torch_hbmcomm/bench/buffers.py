"""The tensors that a rank communicates with, and their contents after each collective."""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.distributed as dist


class Buffers:
    """Tensors that are made on first use, and shared by all contenders that communicate from this
    kind of memory.

    They hold zeros, so that sums in place stay zero, and never become infinite or denormal. The
    zeros were written, so that no page is the kernel's shared zero page.

    empty: `torch.empty`, `torch_hbmcomm.memory.empty`, or another function with their arguments.
    """

    def __init__(self, empty: Callable[..., torch.Tensor], size: int, dtype: str, ranks: int):
        self._empty = empty
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.size = size
        self._ranks = ranks
        self._made: list[torch.Tensor] = []

    @cached_property
    def whole(self) -> torch.Tensor:
        """The tensor of all `size` bytes."""
        return self._zeros(self.size)

    @cached_property
    def other(self) -> torch.Tensor:
        """A tensor as large as `whole`, for alltoall, whose input and output have this size."""
        return self._zeros(self.size)

    @cached_property
    def share(self) -> torch.Tensor:
        """A tensor for one rank's part, of `size` / ranks bytes, in memory of its own."""
        return self._zeros(self.size // self._ranks)

    def shares(self) -> list[torch.Tensor]:
        """Return the views of `whole`, one for each rank."""
        return list(self.whole.chunk(self._ranks))

    def fill(self, value: int) -> None:
        for tensor in self._made:
            tensor.fill_(value)

    def _zeros(self, size: int) -> torch.Tensor:
        tensor = self._empty(size // self.dtype.itemsize, dtype=self.dtype).fill_(0)
        self._made.append(tensor)
        return tensor


def check(collective: str, call: Callable[[], object], buffers: Buffers) -> None:
    """Call a collective once, with each rank's buffers filled with rank + 1, and check the outcome.

    All ranks call it, before a contender is timed. Raises RuntimeError for a wrong outcome;
    otherwise leaves zeros.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    buffers.fill(rank + 1)
    dist.barrier()
    call()
    for tensor, value in _EXPECTED[collective](buffers, rank, ranks):
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
