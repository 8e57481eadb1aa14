"""allreduce_native: allreduce called in a loop of C++, below Python and the dispatcher, whose costs
hide the rest at small sizes.

Each rank starts a native program of its own, which is one rank of the same job.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from functools import cache

import torch.distributed as dist

from benchmarks import programs
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.contenders import OVER_MPI, Contender, Hbm
from torch_hbmcomm.bench.mpich import Mpich
from torch_hbmcomm.bench.rounds import Timed

NATIVE = "allreduce_native"


class NativeRank:
    """One rank's native program, from its start to the end of this process.

    kind: "zero-copy" or "staged", hbm on one node; "mpi", hbm over MPI; "mpich", MPI itself.
    """

    def __init__(self, kind: str) -> None:
        place = [tempfile.mkdtemp(prefix="hbmcomm-bench-") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(place)
        libraries = os.path.join(sysconfig.get_path("data"), "lib")
        self._program = programs.Program(
            "allreduce", place[0], dist.get_rank(), dist.get_world_size(), kind, libraries
        )
        self._program.ask("ready")
        dist.barrier()  # all have met
        if dist.get_rank() == 0:
            shutil.rmtree(str(place[0]))

    def prepare(self, buffers: Buffers) -> Timed:
        """Return the loop. Raises PeerFailed where the program finds a wrong sum."""
        self._program.ask("prepare", buffers.size, str(buffers.dtype).removeprefix("torch."))
        return self._program.timed("run")


@cache
def _rank(kind: str) -> NativeRank:
    """Return the native program of a kind. All ranks ask for the same ones in the same order."""
    return NativeRank(kind)


class HbmBelow(Hbm):
    """The contender hbm, with its native loop."""

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return _offers(self, collective, dtype) or super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        if collective != NATIVE:
            return super().prepare(collective, buffers)
        over_mpi = self._node == OVER_MPI
        kind = "mpi" if over_mpi else "zero-copy" if self.zero_copy else "staged"
        return _rank(kind).prepare(buffers)


class MpichBelow(Mpich):
    """The contender MPI, with its native loop."""

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return _offers(self, collective, dtype) or super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        if collective != NATIVE:
            return super().prepare(collective, buffers)
        return _rank("mpich").prepare(buffers)


def _offers(contender: Contender, collective: str, dtype: str) -> bool:
    built = programs.why_unavailable() is None
    return collective == NATIVE and dtype in contender.dtypes and built
