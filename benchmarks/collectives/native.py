"""Collectives of hbm and of MPI, called in loops of C++.

With small tensors, Python and the dispatcher would take most of the time. So each rank starts a
native program, and these programs are the ranks of a second job.
"""

from __future__ import annotations

import atexit
import os
import sysconfig
import tempfile
from abc import abstractmethod
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
from torch_hbmcomm.sizes import KIB

MEET_SECONDS = 60.0
_LIBRARIES = Path(sysconfig.get_path("data"), "lib")
STANDARD_ABI = _LIBRARIES / "libmpi_abi.so.1"  # in MPICH 5 and later


def _folder() -> str:
    """Make the directory of the programs' store. It is removed when this process ends."""
    made = tempfile.TemporaryDirectory(prefix="hbmcomm-bench-", ignore_cleanup_errors=True)
    atexit.register(made.cleanup)
    return made.name


def meet(start: Callable[[str], programs.Conversation]) -> programs.Conversation:
    """Return this rank's native program, once all ranks' programs have met. All ranks call it.

    start: starts the program; takes the path of a directory that all ranks share.

    Raises PeerFailed if a program fails, or if the programs have not met after MEET_SECONDS.
    """
    shared = [_folder() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    program = start(str(shared[0]))
    program.tell("ready")
    if not program.says(MEET_SECONDS):
        raise PeerFailed(f"the ranks' programs did not meet within {MEET_SECONDS} s")
    program.answer()
    dist.barrier()  # all programs have met
    return program


def loop(program: programs.Conversation, buffers: Buffers, *words: str) -> Timed:
    """Prepare a collective, and return its loop. Raises PeerFailed if its result is wrong.

    words: the first words of the command "prepare"; the size and the type follow them.
    """
    program.ask("prepare", *words, buffers.size, str(buffers.dtype).removeprefix("torch."))
    return program.timed("run")


@cache
def _rank(
    contender: str, name: str, *arguments: str, environment: tuple[str, ...] = ()
) -> programs.Conversation:
    """Return a native program. The first call with these arguments starts it.

    The program runs until this process ends.

    All ranks must call it with the same arguments in the same order.

    contender: the name of the contender. Each has its own program, because a program runs only the
        loop that was prepared last.
    arguments: further arguments, after the directory, the rank, the world size and the directory of
        MPI's library.
    environment: variables, as NAME=VALUE.
    """

    def start(folder: str) -> programs.Conversation:
        common = (folder, dist.get_rank(), dist.get_world_size(), _LIBRARIES)
        launcher = ["env", *environment]
        return programs.Program(name, *common, *arguments, launcher=launcher)

    return meet(start)


class InC(Contender):
    """Collectives in a native program, one per rank."""

    def why_unavailable(self) -> str | None:
        return programs.why_unavailable()

    def open(self) -> None:
        """Do nothing: the first prepare() starts the program."""

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        return loop(self.program(), buffers, collective)

    @abstractmethod
    def program(self) -> programs.Conversation:
        """Return this rank's program. All ranks call it."""


class HbmInC(InC):
    """hbm, called by C++ without Python and PyTorch's dispatcher.

    node: the value of HBMCOMM_NODE.
    library: MPI's library; None: the library that hbm finds.
    """

    def __init__(
        self,
        name: str,
        about: str,
        zero_copy: bool = False,
        node: str | None = None,
        library: Path | None = None,
    ) -> None:
        self.name = name
        self.about = about
        self.zero_copy = zero_copy
        self._node = node
        self._environment = [] if node is None else [f"HBMCOMM_NODE={node}"]
        self._environment += [] if library is None else [f"HBMCOMM_MPI_LIB={library}"]
        self._library = library

    def why_unavailable(self) -> str | None:
        if self._library is not None and not self._library.exists():
            return f"{self._library} does not exist: pip install 'mpich>=5'"
        through_dist = Hbm(self.name, self.about, node=self._node)
        return super().why_unavailable() or through_dist.why_unavailable()

    def program(self) -> programs.Conversation:
        kind = "zero-copy" if self.zero_copy else "staged"
        return _rank(self.name, "hbm_loops", kind, environment=tuple(self._environment))


class Slots(InC):
    """Plain loops through slots in shared memory, with plain tensors."""

    name = "slots"
    about = "staging at the least: plain loops through shared slots, without checks and sleep"
    reference = True
    dtypes = ("float32",)

    _COLLECTIVES = ("allreduce", "broadcast", "sendrecv")
    _SLOT_BYTES = 32 * KIB

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return collective in self._COLLECTIVES and super().offers(collective, dtype, size)

    def program(self) -> programs.Conversation:
        return _rank(self.name, "slot_loops", str(self._SLOT_BYTES))


class MpiInC(InC):
    """MPI in a native program."""

    name = "mpi-c"
    about = "MPI itself in a program without Python, from buffer to buffer as in c10d"
    dtypes = Mpich.dtypes

    _MOST_ELEMENTS = (1 << 31) - 1  # MPI counts in an int

    def why_unavailable(self) -> str | None:
        over_mpi = Hbm(self.name, self.about, node=OVER_MPI)
        return super().why_unavailable() or over_mpi.why_unavailable()

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        fits = size // getattr(torch, dtype).itemsize <= self._MOST_ELEMENTS
        return super().offers(collective, dtype, size) and fits

    def program(self) -> programs.Conversation:
        return _rank(self.name, "mpi_collectives")


class MpiInPlace(MpiInC):
    """MPI in a native program, with collectives in place: the series C of Woo et al. 2020."""

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


class MpiStaged(MpiInC):
    """A plain program that stages its data as hbm does, and sends it by MPI_Isend."""

    name = "mpi-c-staged"
    about = "a plain program: tensor, staging buffer, MPI_Isend and MPI_Irecv, buffer, tensor"

    _COLLECTIVES = ("allreduce", "broadcast", "gather")

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return collective in self._COLLECTIVES and super().offers(collective, dtype, size)

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        return super().prepare(f"{collective}_staged", buffers)


class InstalledMpi(MpiInC):
    """Another MPI from PyPI, in its own directory because its files have the names of mpich's.

    package: name in PyPI.
    library: path of the MPI library.
    """

    package: str
    library: Path

    def why_unavailable(self) -> str | None:
        if not self.library.exists():
            folder = os.path.relpath(folder_of(self.package))
            return f"pip install --ignore-installed --prefix {folder} {self.package}"
        return super().why_unavailable()


def folder_of(package: str) -> Path:
    """Return the directory of an MPI from PyPI."""
    return Path(__file__).resolve().parents[2] / "build/mpi" / package


def oversubscribed() -> bool:
    """Return True if the ranks outnumber the processors."""
    return dist.get_world_size() > machine.cores()


class IntelMpi(InstalledMpi):
    name = "intel-mpi"
    about = "Intel MPI in the program of mpi-c"
    package = "impi-rt"
    library = folder_of(package) / "lib/libmpi.so.12"

    def program(self) -> programs.Conversation:
        yielding = ("I_MPI_WAIT_MODE=1", "I_MPI_THREAD_YIELD=2") if oversubscribed() else ()
        environment = (f"HBMCOMM_MPI_LIB={self.library}", *yielding)
        return _rank(self.name, "mpi_collectives", environment=environment)
