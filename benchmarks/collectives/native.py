"""Collectives called in loops of C++: allreduce_native, below Python and the dispatcher, whose
costs hide the rest at small sizes; and MPI's own.

Each rank starts a native program of its own, which is one rank of the same job.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import torch.distributed as dist

from benchmarks import programs
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.contenders import OVER_MPI, Contender, Hbm
from torch_hbmcomm.bench.mpich import Mpich
from torch_hbmcomm.bench.rounds import Timed

NATIVE = "allreduce_native"
INTEL_MPI = Path(__file__).resolve().parents[2] / "build/mpi/impi-rt"


class NativeRank:
    """One rank's native program, from its start to the end of this process.

    arguments: what comes behind those that all such programs have, its place among the ranks and
        the folder of MPI's library.
    mpi: that it loads MPI from; else the one that is found first.
    """

    def __init__(self, program: str, *arguments: str, mpi: Path | None = None) -> None:
        place = [tempfile.mkdtemp(prefix="hbmcomm-bench-") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(place)
        libraries = os.path.join(sysconfig.get_path("data"), "lib")
        self._program = programs.Program(
            program,
            place[0],
            dist.get_rank(),
            dist.get_world_size(),
            libraries,
            *arguments,
            launcher=["env", f"HBMCOMM_MPI_LIB={mpi}"] if mpi else [],
        )
        self._program.ask("ready")
        dist.barrier()  # all have met
        if dist.get_rank() == 0:
            shutil.rmtree(str(place[0]))

    def prepare(self, buffers: Buffers, *words: str) -> Timed:
        """Return the loop. words: come before the size and the type. Raises PeerFailed where the
        program finds a wrong outcome."""
        dtype = str(buffers.dtype).removeprefix("torch.")
        self._program.ask("prepare", *words, buffers.size, dtype)
        return self._program.timed("run")


@cache
def _rank(program: str, *arguments: str, mpi: Path | None = None) -> NativeRank:
    """Return a native program, one for each kind. All ranks ask for the same ones in the same
    order."""
    return NativeRank(program, *arguments, mpi=mpi)


class HbmBelow(Hbm):
    """The contender hbm, with its native loop."""

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return _offers(self, collective, dtype) or super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        if collective != NATIVE:
            return super().prepare(collective, buffers)
        over_mpi = self._node == OVER_MPI
        kind = "mpi" if over_mpi else "zero-copy" if self.zero_copy else "staged"
        return _rank("allreduce", kind).prepare(buffers)


class StandardAbi(Contender):
    """hbm over the MPI library beside this Python, by the standard ABI of MPI 5; the native loop
    alone, since a process has one MPI library."""

    name = "hbm-mpi-abi"
    about = "hbm-mpi's native loop with libmpi_abi.so.1, the library of MPI 5's standard ABI"

    _LIBRARY = Path(sysconfig.get_path("data"), "lib", "libmpi_abi.so.1")

    def why_unavailable(self) -> str | None:
        if not self._LIBRARY.exists():
            return f"{self._LIBRARY} is not there: pip install 'mpich>=5'"
        return programs.why_unavailable()

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return _offers(self, collective, dtype)

    def open(self) -> None:
        """Do nothing: the program starts with the first cell."""

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        return _rank("allreduce", "mpi", mpi=self._LIBRARY).prepare(buffers)


class MpichBelow(Mpich):
    """The contender MPI, with its native loop."""

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return _offers(self, collective, dtype) or super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        if collective != NATIVE:
            return super().prepare(collective, buffers)
        return _rank("mpi_collectives").prepare(buffers, "allreduce")


class MpiInC(Contender):
    """MPI in a program without Python, which every rank has: the series C of Woo et al. 2020."""

    name = "mpi-c"
    about = "MPI itself, in place, in a program without Python"
    dtypes = Mpich.dtypes

    def why_unavailable(self) -> str | None:
        over_mpi = Hbm(self.name, self.about, node=OVER_MPI)
        return programs.why_unavailable() or over_mpi.why_unavailable()

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return collective in ("allreduce", "broadcast", "gather") and dtype in self.dtypes

    def open(self) -> None:
        """Do nothing: the program starts with the first cell."""

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        return _rank("mpi_collectives").prepare(buffers, collective)


class IntelMpi(MpiInC):
    """Intel MPI in such a program, as PyPI's impi-rt has it: in a folder of its own, because it has
    files of the same names as the package mpich."""

    name = "intel-mpi"
    about = "Intel MPI, in place, in a program without Python"
    library = INTEL_MPI / "lib/libmpi.so.12"

    def why_unavailable(self) -> str | None:
        if not self.library.exists():
            folder = os.path.relpath(INTEL_MPI)
            return f"pip install --ignore-installed --prefix {folder} impi-rt"
        return super().why_unavailable()

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return _offers(self, collective, dtype) or super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        of_mpi = "allreduce" if collective == NATIVE else collective
        return _rank("mpi_collectives", mpi=self.library).prepare(buffers, of_mpi)


def _offers(contender: Contender, collective: str, dtype: str) -> bool:
    built = programs.why_unavailable() is None
    return collective == NATIVE and dtype in contender.dtypes and built
