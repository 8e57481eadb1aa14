"""The environment variables of torch_hbmcomm: their list, and warnings and errors for wrong ones.

docs/environment.md describes the variables of this list, and no other HBMCOMM_ variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache

VARIABLES = {
    "HBMCOMM_ALLOCATOR": "where PyTorch puts large CPU tensors: default or segment (shared memory)",
    "HBMCOMM_BIND": "CPUs of each rank: none (the default), core, numa or auto",
    "HBMCOMM_BOX": "address of the memory box that C programs use (smb.h)",
    "HBMCOMM_BOX_MEMORY": "bytes of the box that parameter_server=auto makes (half the machine's)",
    "HBMCOMM_BOX_SEAL": "0: boxes and their clients do not authenticate tcp's data (1: they do)",
    "HBMCOMM_BOX_TRANSPORT": "how C programs reach it: auto (the default), shm, tcp or verbs",
    "HBMCOMM_HEARTBEAT_TIMEOUT": "seconds that another machine may not answer (the timeout)",
    "HBMCOMM_INSTEAD_OF": "backends whose groups are groups of hbm: gloo, mpi, ucc, ccl; or all",
    "HBMCOMM_DEVICE_CHUNK_BYTES": "chunks of large operations on an accelerator's tensors (4M)",
    "HBMCOMM_INTERFACES": "network interfaces at whose addresses other machines reach hbm (all)",
    "HBMCOMM_ISA": "instruction set of the reduction kernels, instead of the best one",
    "HBMCOMM_LOG": "lowest level shown: error, warn (the default), info or debug",
    "HBMCOMM_MEMORY": "where memory comes from: preferred (the default), bind, interleave or ddr",
    "HBMCOMM_METRICS": "folder in which each rank writes its counters, for Prometheus",
    "HBMCOMM_MPI_INCLUDE": "directory of MPICH's mpi.h, for native tests and benchmarks (found)",
    "HBMCOMM_MPI_LIB": "path of the MPI library to load",
    "HBMCOMM_NODE": "how the ranks of a group reach one another: auto (the default), shm or mpi",
    "HBMCOMM_NODE_ID": "sets ranks with different values apart, as if on different nodes",
    "HBMCOMM_PARAMETER_SERVER": "memory boxes of every group: auto, or addresses of running ones",
    "HBMCOMM_PORTS": "range of the TCP ports at which hbm listens (the kernel's choice)",
    "HBMCOMM_PROFILE": "folder in which each rank records its operations, for hbmcomm profile",
    "HBMCOMM_REDUCE_THREADS": "threads that share a rank's large reductions and copies (1)",
    "HBMCOMM_SOCKET_DIR": "where processes that share memory find each other (/dev/shm)",
    "HBMCOMM_STAGING_BYTES": "bound of the staging memory, in bytes",
    "HBMCOMM_TEST_BACKEND": "backend that the tests run on (hbm)",
    "HBMCOMM_TEST_DEVICE": "device type that the tests of accelerators run on (late, their own)",
    "HBMCOMM_TEST_RANKS": "number of ranks of the tests (all sizes)",
    "HBMCOMM_TEST_SEED": "seed of the tests' data (fresh)",
    "HBMCOMM_TEST_SLURM_PORTS": "three ports of the tests' Slurm cluster (chosen)",
    "HBMCOMM_TOKEN": "the token of a memory box; before HBMCOMM_TOKEN_FILE",
    "HBMCOMM_TOKEN_FILE": "file with the token of a memory box (~/.config/hbmcomm/token)",
    "HBMCOMM_TORCH": "directories of unpacked wheels of PyTorch that a build has an extension for",
    "HBMCOMM_VERBS_LIB": "path of libhbm_verbs.so, the box's transport over RDMA",
    "HBMCOMM_WITHOUT_TORCH": "1: a build has the memory box alone",
}

REPLACEABLE = ("gloo", "mpi", "ucc", "ccl")  # backends that HBMCOMM_INSTEAD_OF may name


def value(name: str, default: str = "") -> str:
    """Return a variable's value. An empty variable counts as unset."""
    return os.environ.get(name) or default


def first_use(rank: int | None = None) -> None:
    """Check the environment of a process that uses hbm. Called whenever a group is formed, or
    hbmcomm.memory allocates or binds.

    Warns as warn_of_wrong_ones does. Raises ValueError for a wrong value of a variable that
    `import torch` reads.
    """
    warn_of_wrong_ones(rank)
    require_choices()


def warn_of_wrong_ones(rank: int | None = None) -> None:
    """Print one warning in a job, on rank 0, for all HBMCOMM_ variables that torch_hbmcomm does not
    know. If `rank` is None, the rank is the launcher's RANK, or 0 without one. The log itself warns
    of a wrong value of HBMCOMM_LOG."""
    if (rank if rank is not None else value("RANK", "0")) in (0, "0"):
        _warn_once()


def require_choices() -> None:
    """Raise ValueError for a wrong value of a variable that `import torch` reads."""
    where = value("HBMCOMM_ALLOCATOR", "default")
    if where not in ("default", "segment"):
        raise ValueError(f'HBMCOMM_ALLOCATOR={where} is neither "default" nor "segment"')
    replaced_backends(value("HBMCOMM_INSTEAD_OF", "all"))


def replaced_backends(names: str) -> list[str]:
    """Return the backends that a value of HBMCOMM_INSTEAD_OF names, each once. Raises ValueError if
    hbm cannot take the place of one of them."""
    if names.strip() == "all":
        return list(REPLACEABLE)
    asked = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in asked:
        if name not in REPLACEABLE:
            raise ValueError(
                f'HBMCOMM_INSTEAD_OF={names}: hbm cannot take the place of "{name}"; name one or '
                "more of gloo, mpi, ucc and ccl, separated by commas, or all; or unset the variable"
            )
    return asked


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that begin with HBMCOMM_, sorted. A token's value is left out."""
    return {
        name: "(not shown)" if name == "HBMCOMM_TOKEN" else environ[name]
        for name in sorted(environ)
        if name.startswith("HBMCOMM_")
    }


def unknown(names: Mapping[str, str]) -> dict[str, str]:
    """Return advice for each name that no part of torch_hbmcomm reads."""
    import difflib  # here: most processes do not need it

    advice = {}
    for name in names:
        if name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            advice[name] = f"did you mean {close[0]}?" if close else "nothing reads it; unset it"
    return advice


def say(message: str) -> None:
    """Print a warning in the format of the log, without loading the native module."""
    if value("HBMCOMM_LOG") != "error":
        time = datetime.now(timezone.utc).replace(tzinfo=None).isoformat(timespec="milliseconds")
        print(f"{time}Z [hbm] warn: {message}", file=sys.stderr)


@cache
def _warn_once() -> None:
    wrong = [
        f"{name} is no variable of torch_hbmcomm: {what}"
        for name, what in unknown(settings(os.environ)).items()
    ]
    if wrong:
        say("; ".join(wrong))
