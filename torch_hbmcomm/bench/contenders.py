"""The contenders: backends of torch.distributed, called through its public functions.

All are compared with the first contender that is measured. To measure another contender, implement
`Contender` and give it to collectives.py, as benchmarks/collectives does.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.distributed as dist

from torch_hbmcomm import native
from torch_hbmcomm.bench.buffers import Buffers, check
from torch_hbmcomm.bench.rounds import Timed, timed
from torch_hbmcomm.sizes import KIB

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32")
OVER_MPI = "mpi"  # a value of HBMCOMM_NODE

Call = Callable[[], object]


class Contender(ABC):
    """One way of doing collectives. It is pickled to each rank.

    Its methods are called in the order in which they are declared here.

    name: the contender's name, in the command line and in every report.
    about: a description in a line.
    zero_copy: True: buffers come from `torch_hbmcomm.memory`; False: plain tensors.
    reference: True: the contender does only a part of the job, and shows the cost of that part.
    dtypes: the supported element types.
    """

    name: str
    about: str
    zero_copy: bool = False
    reference: bool = False
    dtypes: tuple[str, ...] = DTYPES

    def why_unavailable(self) -> str | None:
        """Return None if the contender can run here, else the cause and what to do. Called before
        ranks start."""
        return None

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        """Return True if the contender is measured in that row. By default it is measured in all
        collectives, with the types in `dtypes`."""
        return collective in COLLECTIVE_CALLS and dtype in self.dtypes

    @abstractmethod
    def open(self) -> None:
        """Get ready for collectives. The process already has a default group, and may have groups
        of other contenders. All ranks call it."""

    @abstractmethod
    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        """Check the outcome of one call, except for a reference, and return the loop of timed
        calls. All ranks call it. REQUIRES: open() was called, and offers() is true for the
        collective and the buffers."""


class PythonContender(Contender):
    """A contender whose collectives are functions of Python."""

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        call = self.call(collective, buffers)
        if not self.reference:
            check(collective, call, buffers)
        return timed(call)

    @abstractmethod
    def call(self, collective: str, buffers: Buffers) -> Call:
        """Return a function that does the collective once."""


@contextmanager
def node_level(chosen: str | None) -> Iterator[None]:
    """Set HBMCOMM_NODE to `chosen` inside the context, or unset it if `chosen` is None. The groups
    that are created inside use this value."""
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
    """Return the group of all ranks over a backend; the first call for a backend and node makes it.
    All ranks make the same calls in the same order."""
    with node_level(node):
        group: dist.ProcessGroup = dist.new_group(backend=backend)
        return group


class TorchBackend(PythonContender):
    """A backend of torch.distributed.

    starts: True: the time of start() is measured, too.
    """

    starts: bool = True

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

    def start(self) -> None:
        """Make the default group, and do a first collective.

        REQUIRES: the process has imported torch, has torchrun's environment, and has no group.
        """
        dist.init_process_group(self._backend)
        dist.all_reduce(torch.zeros(1))

    def open(self) -> None:
        self._group = group_of_all(self._backend)

    def call(self, collective: str, buffers: Buffers) -> Call:
        return COLLECTIVE_CALLS[collective](self._group, buffers)


class Hbm(TorchBackend):
    """The backend hbm.

    node: the value of HBMCOMM_NODE when its group is created; None: unset.
    """

    def __init__(self, name: str, about: str, zero_copy: bool = False, node: str | None = None):
        super().__init__(name, about, "hbm")
        self.zero_copy = zero_copy
        self.starts = zero_copy or node is not None  # plain tensors do not change the startup
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

    def start(self) -> None:
        with node_level(self._node):
            super().start()

    def open(self) -> None:
        self._group = group_of_all(self._backend, self._node)


class Nothing(TorchBackend):
    """PyTorch's own fake backend: the cost of a call that communicates nothing."""

    reference = True
    starts = False
    _MOST_BYTES = 4 * KIB

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return size <= self._MOST_BYTES and super().offers(collective, dtype, size)

    def open(self) -> None:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

        super().open()


def _allreduce(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    tensor = buffers.whole
    return lambda: dist.all_reduce(tensor, group=group)


def _broadcast(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    tensor = buffers.whole
    return lambda: dist.broadcast(tensor, src=0, group=group)


def _reduce(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    tensor = buffers.whole
    return lambda: dist.reduce(tensor, dst=0, group=group)


def _function(name: str, before: str) -> Callable[..., object]:
    """Return the function `name` of torch.distributed, or `before`, its name in older releases."""
    found: Callable[..., object] = getattr(dist, name, None) or getattr(dist, before)
    return found


def _allgather(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    gathered, own = buffers.whole, buffers.share
    gather = _function("all_gather_single", "all_gather_into_tensor")
    return lambda: gather(gathered, own, group=group)


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
    reduce_scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
    return lambda: reduce_scatter(own, scattered, group=group)


def _alltoall(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    received, sent = buffers.whole, buffers.other
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _barrier(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    return lambda: dist.barrier(group=group)


def _sendrecv(group: dist.ProcessGroup, buffers: Buffers) -> Call:
    rank, tensor = dist.get_rank(), buffers.whole
    send = partial(dist.send, tensor, rank ^ 1, group=group)
    receive = partial(dist.recv, tensor, rank ^ 1, group=group)
    return ping_pong(rank, dist.get_world_size(), send, receive)


def ping_pong(rank: int, ranks: int, send: Call, receive: Call) -> Call:
    """Return a call that sends a message there and back within the pairs of ranks (0, 1), (2, 3),
    ...; an odd last rank does nothing."""
    if rank ^ 1 >= ranks:
        return lambda: None
    first, second = (receive, send) if rank % 2 else (send, receive)

    def both() -> None:
        first()
        second()

    return both


COLLECTIVE_CALLS: dict[str, Callable[[dist.ProcessGroup, Buffers], Call]] = {
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
