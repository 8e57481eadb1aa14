"""Contenders that are backends of torch.distributed, called through its public functions."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist

from torch_hbmcomm import native
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.collectives import NATIVE, STARTUP, Cell
from torch_hbmcomm.bench.contender import Contender, Loop, repeated
from torch_hbmcomm.bench.sizes import KIB

OVER_MPI = "mpi"  # of HBMCOMM_NODE


@contextmanager
def node_level(chosen: str | None) -> Iterator[None]:
    """Sets HBMCOMM_NODE, or clears it for None, for the groups that are created inside."""
    before = os.environ.pop("HBMCOMM_NODE", None)
    if chosen is not None:
        os.environ["HBMCOMM_NODE"] = chosen
    try:
        yield
    finally:
        os.environ.pop("HBMCOMM_NODE", None)
        if before is not None:
            os.environ["HBMCOMM_NODE"] = before


@cache
def group_of_all(backend: str, node: str | None = None) -> dist.ProcessGroup:
    """One for each kind. All ranks ask for the same ones in the same order."""
    with node_level(node):
        group: dist.ProcessGroup = dist.new_group(backend=backend)
        return group


class TorchBackend(Contender):
    def __init__(self, name: str, about: str, backend: str):
        self.name = name
        self.about = about
        self._backend = backend

    def why_unavailable(self) -> str | None:
        if dist.is_backend_available(self._backend):
            return None
        return (
            f"torch.distributed has no backend {self._backend!r} "
            f"(it has {', '.join(dist.Backend.backend_list)}); `hbmcomm info` shows the cause"
        )

    def offers(self, cell: Cell) -> bool:
        return cell.collective == STARTUP or super().offers(cell)

    def start(self) -> None:
        dist.init_process_group(self._backend)
        dist.all_reduce(torch.zeros(1))

    def open(self) -> None:
        self._group = group_of_all(self._backend)

    def prepare(self, cell: Cell, buffers: Buffers) -> Loop:
        return repeated(_CALLS[cell.collective](self._group, buffers))


class Hbm(TorchBackend):
    """node: what HBMCOMM_NODE says when its group is created."""

    def __init__(self, name: str, about: str, placed: bool = False, node: str | None = None):
        super().__init__(name, about, "hbm")
        self.placed = placed
        self._node = node

    def why_unavailable(self) -> str | None:
        cause = super().why_unavailable()
        if cause is not None:
            return cause
        try:
            extension = native.load()
            if self._node == OVER_MPI:
                extension.mpi_info()
        except (ImportError, RuntimeError) as error:
            return str(error)
        return None

    def offers(self, cell: Cell) -> bool:
        if cell.collective == STARTUP:
            return self.placed or self._node is not None  # where tensors lie changes no start
        return cell.collective == NATIVE or super().offers(cell)

    def start(self) -> None:
        with node_level(self._node):
            super().start()

    def open(self) -> None:
        self._group = group_of_all(self._backend, self._node)

    def prepare(self, cell: Cell, buffers: Buffers) -> Loop:
        if cell.collective != NATIVE:
            return super().prepare(cell, buffers)
        allreduce = native.load().bench_allreduce
        group, tensor = self._group._get_backend(torch.device("cpu")), buffers.whole
        return lambda calls: allreduce(group, tensor, calls)


class Nothing(TorchBackend):
    """PyTorch's own fake backend: what a call costs before anybody communicates."""

    reference = True
    _MOST_BYTES = 4 * KIB

    def offers(self, cell: Cell) -> bool:
        return (
            cell.collective != STARTUP and cell.bytes <= self._MOST_BYTES and super().offers(cell)
        )

    def open(self) -> None:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

        super().open()


Call = Callable[[], object]


def _allreduce(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    tensor = buffers.whole
    return lambda: dist.all_reduce(tensor, group=group)


def _broadcast(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    tensor = buffers.whole
    return lambda: dist.broadcast(tensor, src=0, group=group)


def _reduce(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    tensor = buffers.whole
    return lambda: dist.reduce(tensor, dst=0, group=group)


def _allgather(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    gathered, own = buffers.whole, buffers.share
    return lambda: dist.all_gather_single(gathered, own, group=group)


def _gather(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    own = buffers.share
    gathered = buffers.shares() if dist.get_rank() == 0 else None
    return lambda: dist.gather(own, gathered, dst=0, group=group)


def _scatter(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    own = buffers.share
    scattered = buffers.shares() if dist.get_rank() == 0 else None
    return lambda: dist.scatter(own, scattered, src=0, group=group)


def _reduce_scatter(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    own, scattered = buffers.share, buffers.whole
    return lambda: dist.reduce_scatter_single(own, scattered, group=group)


def _alltoall(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    received, sent = buffers.whole, buffers.other
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _barrier(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    return lambda: dist.barrier(group=group)


def _sendrecv(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    rank = dist.get_rank()
    peer = rank ^ 1
    tensor = buffers.whole

    def first() -> None:
        dist.send(tensor, peer, group=group)
        dist.recv(tensor, peer, group=group)

    def second() -> None:
        dist.recv(tensor, peer, group=group)
        dist.send(tensor, peer, group=group)

    if peer >= dist.get_world_size():
        return lambda: None
    return first if rank < peer else second


_CALLS: dict[str, Callable[[dist.ProcessGroup, Buffers], Call]] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "alltoall": _alltoall,
    "barrier": _barrier,
    "sendrecv": _sendrecv,
}
