"""The contender MPI, through mpi4py, on plain memory.

It uses MPI's in-place form of a collective if there is one, because this form is faster. There are
two exceptions: the in-place reduce_scatter would overwrite its input, and the in-place alltoall
goes through buffers inside MPI. No mpiexec starts the ranks: a group of hbm over MPI forms the MPI
world.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from torch_hbmcomm import native
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.contenders import OVER_MPI, Call, PythonContender, group_of_all, ping_pong


class Mpich(PythonContender):
    name = "mpich"
    about = "MPI itself (mpi4py), in place"
    dtypes = ("float32", "float64", "int32")

    def why_unavailable(self) -> str | None:
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed: pip install mpi4py"
        try:
            native.load().mpi_info()
        except (ImportError, RuntimeError) as error:
            return str(error)
        return None

    def open(self) -> None:
        group_of_all("hbm", OVER_MPI)
        # Imported after hbm has formed the MPI world. If it were imported before, mpi4py would
        # initialise MPI itself, with a world of this rank alone.
        from mpi4py import MPI

        self._mpi = MPI

    def call(self, collective: str, buffers: Buffers) -> Call:
        return _CALLS[collective](self._mpi, self._mpi.COMM_WORLD, buffers)


def _allreduce(mpi: Any, world: Any, buffers: Buffers) -> Call:
    array = buffers.whole.numpy()
    return lambda: world.Allreduce(mpi.IN_PLACE, array)


def _broadcast(mpi: Any, world: Any, buffers: Buffers) -> Call:
    array = buffers.whole.numpy()
    return lambda: world.Bcast(array, root=0)


def _reduce(mpi: Any, world: Any, buffers: Buffers) -> Call:
    array = buffers.whole.numpy()
    if world.Get_rank() == 0:
        return lambda: world.Reduce(mpi.IN_PLACE, array, root=0)
    return lambda: world.Reduce(array, None, root=0)


def _allgather(mpi: Any, world: Any, buffers: Buffers) -> Call:
    array = buffers.whole.numpy()
    return lambda: world.Allgather(mpi.IN_PLACE, array)


def _gather(mpi: Any, world: Any, buffers: Buffers) -> Call:
    array = _of_root(world, buffers)
    if world.Get_rank() == 0:
        return lambda: world.Gather(mpi.IN_PLACE, array, root=0)
    return lambda: world.Gather(array, None, root=0)


def _scatter(mpi: Any, world: Any, buffers: Buffers) -> Call:
    array = _of_root(world, buffers)
    if world.Get_rank() == 0:
        return lambda: world.Scatter(array, mpi.IN_PLACE, root=0)
    return lambda: world.Scatter(None, array, root=0)


def _reduce_scatter(mpi: Any, world: Any, buffers: Buffers) -> Call:
    own, scattered = buffers.share.numpy(), buffers.whole.numpy()
    return lambda: world.Reduce_scatter_block(scattered, own)


def _alltoall(mpi: Any, world: Any, buffers: Buffers) -> Call:
    received, sent = buffers.whole.numpy(), buffers.other.numpy()
    return lambda: world.Alltoall(sent, received)


def _barrier(mpi: Any, world: Any, buffers: Buffers) -> Call:
    return lambda: world.Barrier()


def _sendrecv(mpi: Any, world: Any, buffers: Buffers) -> Call:
    rank, array = world.Get_rank(), buffers.whole.numpy()
    send, receive = partial(world.Send, array, rank ^ 1), partial(world.Recv, array, rank ^ 1)
    return ping_pong(rank, world.Get_size(), send, receive)


def _of_root(world: Any, buffers: Buffers) -> Any:
    """Return the array of all shares on the root, and the array of one share on other ranks."""
    return (buffers.whole if world.Get_rank() == 0 else buffers.share).numpy()


_CALLS: dict[str, Callable[[Any, Any, Buffers], Call]] = {
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
