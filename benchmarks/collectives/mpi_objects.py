"""The contender MPI with Python objects: mpi4py's lower-case functions, which pickle and unpickle.

The contender is the "MPI object communication" of Woo et al. 2020.
"""

from collections.abc import Callable
from typing import Any

import torch

from torch_hbmcomm.bench.buffers import Buffers, check
from torch_hbmcomm.bench.contenders import Call
from torch_hbmcomm.bench.mpich import Mpich
from torch_hbmcomm.bench.rounds import Timed, timed


class MpiObjects(Mpich):
    name = "mpi-objects"
    about = "MPI with pickled objects (mpi4py)"

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return collective in _CALLS and dtype in self.dtypes

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        call = self.call(collective, buffers)

        def into_buffers() -> None:
            found = call()
            if found is not None:
                buffers.whole.copy_(torch.from_numpy(found))

        check(collective, into_buffers, buffers)
        return timed(call)

    def call(self, collective: str, buffers: Buffers) -> Call:
        return _CALLS[collective](self._mpi.COMM_WORLD, buffers)


def _allreduce(world: Any, buffers: Buffers) -> Call:
    array = buffers.whole.numpy()
    return lambda: world.allreduce(array)


def _broadcast(world: Any, buffers: Buffers) -> Call:
    array = buffers.whole.numpy() if world.Get_rank() == 0 else None
    return lambda: world.bcast(array, root=0)


def _gather(world: Any, buffers: Buffers) -> Call:
    import numpy

    own = buffers.share.numpy()
    gathered = buffers.whole.numpy() if world.Get_rank() == 0 else None

    def gather() -> Any:
        parts = world.gather(own, root=0)
        return None if gathered is None else numpy.concatenate(parts, out=gathered)

    return gather


_CALLS: dict[str, Callable[[Any, Buffers], Call]] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "gather": _gather,
}
