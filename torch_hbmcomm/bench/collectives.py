"""The collectives that are measured, each as a call on prepared float32 buffers.

`bytes` is the size of the larger buffer of a rank: the whole tensor of allreduce, broadcast, reduce
and sendrecv; the gathered side of allgather and gather; the scattered side of scatter and
reduce_scatter; either side of alltoall. Rank 0 is the root. sendrecv is a ping-pong of the pairs
(0, 1), (2, 3), ...: one call is both ways; an odd last rank idles.

Buffers hold zeros that were written, so that reducing in place never leaves the ordinary numbers
and no two pages are the kernel's one zero page.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Operation = Callable[[], object]

_ELEMENT = torch.float32.itemsize


@dataclass(frozen=True)
class Collective:
    name: str
    prepare: Callable[[dist.ProcessGroup, int], Operation]
    divided: bool = False  # the larger buffer holds one equal share for each rank
    sized: bool = True

    def bytes_near(self, asked: int, ranks: int) -> int:
        """The least possible size from `asked` up (0 for a collective that moves no data)."""
        if not self.sized:
            return 0
        step = _ELEMENT * (ranks if self.divided else 1)
        return -(-asked // step) * step


def _buffer(size: int) -> torch.Tensor:
    return torch.empty(size // _ELEMENT, dtype=torch.float32).fill_(0)


def _shares(size: int) -> list[torch.Tensor]:
    return [_buffer(size // dist.get_world_size()) for _ in range(dist.get_world_size())]


def _allreduce(group: dist.ProcessGroup, size: int) -> Operation:
    tensor = _buffer(size)
    return lambda: dist.all_reduce(tensor, group=group)


def _broadcast(group: dist.ProcessGroup, size: int) -> Operation:
    tensor = _buffer(size)
    return lambda: dist.broadcast(tensor, src=0, group=group)


def _reduce(group: dist.ProcessGroup, size: int) -> Operation:
    tensor = _buffer(size)
    return lambda: dist.reduce(tensor, dst=0, group=group)


def _allgather(group: dist.ProcessGroup, size: int) -> Operation:
    gathered, own = _buffer(size), _buffer(size // dist.get_world_size())
    return lambda: dist.all_gather_single(gathered, own, group=group)


def _gather(group: dist.ProcessGroup, size: int) -> Operation:
    own = _buffer(size // dist.get_world_size())
    gathered = _shares(size) if dist.get_rank() == 0 else None
    return lambda: dist.gather(own, gathered, dst=0, group=group)


def _scatter(group: dist.ProcessGroup, size: int) -> Operation:
    own = _buffer(size // dist.get_world_size())
    scattered = _shares(size) if dist.get_rank() == 0 else None
    return lambda: dist.scatter(own, scattered, src=0, group=group)


def _reduce_scatter(group: dist.ProcessGroup, size: int) -> Operation:
    own, scattered = _buffer(size // dist.get_world_size()), _buffer(size)
    return lambda: dist.reduce_scatter_single(own, scattered, group=group)


def _alltoall(group: dist.ProcessGroup, size: int) -> Operation:
    received, sent = _buffer(size), _buffer(size)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _barrier(group: dist.ProcessGroup, size: int) -> Operation:
    return lambda: dist.barrier(group=group)


def _sendrecv(group: dist.ProcessGroup, size: int) -> Operation:
    rank = dist.get_rank()
    peer = rank ^ 1
    tensor = _buffer(size)

    def first() -> None:
        dist.send(tensor, peer, group=group)
        dist.recv(tensor, peer, group=group)

    def second() -> None:
        dist.recv(tensor, peer, group=group)
        dist.send(tensor, peer, group=group)

    if peer >= dist.get_world_size():
        return lambda: None
    return first if rank < peer else second


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("allreduce", _allreduce),
        Collective("broadcast", _broadcast),
        Collective("reduce", _reduce),
        Collective("allgather", _allgather, divided=True),
        Collective("gather", _gather, divided=True),
        Collective("scatter", _scatter, divided=True),
        Collective("reduce_scatter", _reduce_scatter, divided=True),
        Collective("alltoall", _alltoall, divided=True),
        Collective("barrier", _barrier, sized=False),
        Collective("sendrecv", _sendrecv),
    )
}
