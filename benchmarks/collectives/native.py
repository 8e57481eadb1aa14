"""Collectives called in loops of C++: allreduce_native, below Python and the dispatcher, whose
costs hide the rest at small sizes; and MPI's own.

Each rank starts a native program of its own, which is one rank of the same job.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from benchmarks import programs
from torch_hbmcomm import machine
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.contenders import OVER_MPI, Contender, Hbm
from torch_hbmcomm.bench.mpich import Mpich
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.rounds import Timed

NATIVE = "allreduce_native"
MEET_SECONDS = 60.0


def meet(start: Callable[[str], programs.Conversation]) -> programs.Conversation:
    """Return this rank's native program, once those of all ranks have met. All ranks call it.

    start: starts it, with the name of a folder that all have.

    Raises PeerFailed, at the latest when MEET_SECONDS are over.
    """
    place = [tempfile.mkdtemp(prefix="hbmcomm-bench-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    try:
        program = start(str(place[0]))
        program.tell("ready")
        if not program.says(MEET_SECONDS):
            raise PeerFailed(f"not all ranks' programs have met in {MEET_SECONDS} s")
        program.answer()
        dist.barrier()  # all have met
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(place[0]), ignore_errors=True)
    return program


def loop(program: programs.Conversation, buffers: Buffers, *words: str) -> Timed:
    """Return the program's loop. words: come before the size and the type. Raises PeerFailed where
    the program finds a wrong outcome."""
    program.ask("prepare", *words, buffers.size, str(buffers.dtype).removeprefix("torch."))
    return program.timed("run")


@cache
def _rank(name: str, *arguments: str, environment: tuple[str, ...] = ()) -> programs.Conversation:
    """Return a native program, which runs to the end of this process, one for each kind. All ranks
    ask for the same ones in the same order.

    arguments: what comes behind those that all such programs have, its place among the ranks and
        the folder of MPI's library.
    environment: variables, as NAME=VALUE.
    """
    libraries = os.path.join(sysconfig.get_path("data"), "lib")

    def start(folder: str) -> programs.Conversation:
        place = (folder, dist.get_rank(), dist.get_world_size(), libraries)
        launcher = ["env", *environment]
        return programs.Program(name, *place, *arguments, launcher=launcher)

    return meet(start)


class HbmBelow(Hbm):
    """The contender hbm, with its native loop."""

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return _offers(self, collective, dtype) or super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        if collective != NATIVE:
            return super().prepare(collective, buffers)
        over_mpi = self._node == OVER_MPI
        kind = "mpi" if over_mpi else "zero-copy" if self.zero_copy else "staged"
        return loop(_rank("allreduce", kind), buffers)


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
        program = _rank("allreduce", "mpi", environment=(f"HBMCOMM_MPI_LIB={self._LIBRARY}",))
        return loop(program, buffers)


class MpichBelow(Mpich):
    """The contender MPI, with its native loop."""

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return _offers(self, collective, dtype) or super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        if collective != NATIVE:
            return super().prepare(collective, buffers)
        return loop(_rank("mpi_collectives"), buffers, "allreduce")


class MpiInC(Contender):
    """MPI in a program without Python, which every rank has."""

    name = "mpi-c"
    about = "MPI itself in a program without Python, from buffer to buffer as in c10d"
    dtypes = Mpich.dtypes

    _MOST_ELEMENTS = (1 << 31) - 1  # MPI counts in an int

    def why_unavailable(self) -> str | None:
        over_mpi = Hbm(self.name, self.about, node=OVER_MPI)
        return programs.why_unavailable() or over_mpi.why_unavailable()

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        fits = size // getattr(torch, dtype).itemsize <= self._MOST_ELEMENTS
        return super().offers(collective, dtype, size) and fits

    def open(self) -> None:
        """Do nothing: the program starts with the first cell."""

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        return loop(self.program(), buffers, collective)

    def program(self) -> programs.Conversation:
        """Return this rank's program. All ranks call it."""
        return _rank("mpi_collectives")


class MpiInPlace(MpiInC):
    """The series C of Woo et al. 2020: the same, in place where MPI can."""

    name = "mpi-c-in-place"
    about = "MPI itself in a program without Python, in place where MPI can"

    _COLLECTIVES: ClassVar = {
        "allreduce": "allreduce",
        "broadcast": "broadcast",
        "gather": "gather_in_place",
    }

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return collective in self._COLLECTIVES and super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        return super().prepare(self._COLLECTIVES[collective], buffers)


class InstalledMpi(MpiInC):
    """Another MPI in such a program, as PyPI has it: in a folder of its own, because it has files
    of the same names as the package mpich.

    package: of PyPI.
    library: its MPI library.
    """

    package: str
    library: Path

    def why_unavailable(self) -> str | None:
        if not self.library.exists():
            folder = os.path.relpath(folder_of(self.package))
            return f"pip install --ignore-installed --prefix {folder} {self.package}"
        return super().why_unavailable()

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return _offers(self, collective, dtype) or super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        return super().prepare("allreduce" if collective == NATIVE else collective, buffers)


def folder_of(package: str) -> Path:
    """Return the folder that an MPI of PyPI is installed into."""
    return Path(__file__).resolve().parents[2] / "build/mpi" / package


def crowded() -> bool:
    """Whether the ranks outnumber the processors."""
    return dist.get_world_size() > machine.cores()


class IntelMpi(InstalledMpi):
    name = "intel-mpi"
    about = "Intel MPI in the program of mpi-c"
    package = "impi-rt"
    library = folder_of(package) / "lib/libmpi.so.12"

    def program(self) -> programs.Conversation:
        yielding = ("I_MPI_WAIT_MODE=1", "I_MPI_THREAD_YIELD=2") if crowded() else ()
        environment = (f"HBMCOMM_MPI_LIB={self.library}", *yielding)
        return _rank("mpi_collectives", environment=environment)


def _offers(contender: Contender, collective: str, dtype: str) -> bool:
    built = programs.why_unavailable() is None
    return collective == NATIVE and dtype in contender.dtypes and built
