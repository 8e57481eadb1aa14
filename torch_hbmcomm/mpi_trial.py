"""A program that calls MPI_Init_thread, to find out whether the call ends the process.

csrc/communicator/mpi/trial.cpp starts it, with the library's path and the value of
MPI_THREAD_MULTIPLE as arguments. It writes a line when MPI_Init_thread has returned, and waits
until it is killed. It imports only modules of the standard library, because it starts without
site-packages.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _unlink_segments(_: int | None) -> None:
    """Remove the files of MPI's shared memory, because MPI leaves them when it fails."""
    with open("/proc/self/maps") as maps:
        names = {line.split()[-1] for line in maps if "/dev/shm/mpich_" in line}
    for name in names:
        if os.path.exists(name):
            os.unlink(name)


_at_exit = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_unlink_segments)


def main(library: str, thread_multiple: str) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _libc.__cxa_atexit(_at_exit, None, None)  # MPI calls exit() when it fails
    mpi = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    provided = ctypes.c_int()
    mpi.MPI_Init_thread(None, None, int(thread_multiple), ctypes.byref(provided))
    print("hbm: MPI_Init has returned", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
