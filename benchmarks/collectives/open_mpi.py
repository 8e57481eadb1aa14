"""The contender Open MPI.

Open MPI's own mpiexec starts the ranks, because they need PMIx. Open MPI has its own ABI, so its
ranks run open_mpi_collectives, and the ranks of the other MPIs run mpi_collectives.
"""

import os
import shutil
import socket
import subprocess
import sys
from functools import cache

import torch.distributed as dist

from benchmarks import connected, programs
from benchmarks.collectives.native import InstalledMpi, folder_of, meet, oversubscribed
from torch_hbmcomm.bench.peer import PeerFailed

_PROGRAM = "open_mpi_collectives"
_START_SECONDS = 60


class OpenMpi(InstalledMpi):
    name = "open-mpi"
    about = "Open MPI in the program of mpi-c, under its mpiexec"
    package = "openmpi"
    library = folder_of(package) / "lib/libmpi.so.40"

    def why_unavailable(self) -> str | None:
        if shutil.which("setpriv") is None:
            return "setpriv is not installed: apt install util-linux"
        return super().why_unavailable() or programs.why_unavailable(_PROGRAM)

    def program(self) -> programs.Conversation:
        return _rank()


@cache
def _rank() -> programs.Conversation:
    return meet(_start)


def _start(folder: str) -> programs.Conversation:
    """Start the programs of all ranks. Return the connection to this rank's program.

    Rank 0 starts mpiexec. Each program connects to its rank's socket in `folder`.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/{dist.get_rank()}")
        listener.listen()
        dist.barrier()  # all listen
        mpiexec = None
        if dist.get_rank() == 0:
            mpiexec = subprocess.Popen(
                [*_mpiexec(), sys.executable, connected.__file__, folder, programs.path(_PROGRAM)],
                stdin=subprocess.DEVNULL,
                env=os.environ | _AS_ROOT,
            )
        connection = _accepted(listener, mpiexec)
    return programs.Conversation(_PROGRAM, connection.makefile("w"), connection.makefile("r"))


def _accepted(listener: socket.socket, mpiexec: subprocess.Popen[bytes] | None) -> socket.socket:
    """Return the connection from this rank's program. Raises PeerFailed if none comes."""
    listener.settimeout(1)
    for _ in range(_START_SECONDS):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if mpiexec is not None and mpiexec.poll() is not None:
                cause = f"Open MPI's mpiexec failed with {mpiexec.returncode}; its output is above"
                raise PeerFailed(cause) from None
        else:
            connection.settimeout(None)
            return connection
    raise PeerFailed(f"{_PROGRAM} did not start in {_START_SECONDS} s")


def _mpiexec() -> list[str]:
    """Return the words of the mpiexec command that precede the program.

    mpiexec does not bind ranks to processors, because the program binds itself. If ranks outnumber
    the processors, waiting ranks yield. setpriv makes the kernel end mpiexec when this process
    ends: without it, an mpiexec whose ranks never start MPI would remain.
    """
    ranks = str(dist.get_world_size())
    yielding = ["--mca", "mpi_yield_when_idle", "1"] if oversubscribed() else []
    mpiexec = str(folder_of(OpenMpi.package) / "bin/mpiexec")
    ending = ["setpriv", "--pdeathsig", "TERM"]
    return [*ending, mpiexec, "-n", ranks, "--oversubscribe", "--bind-to", "none", *yielding]


_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
