"""init_method="mpi://": each process gets its rank from the launcher (mpiexec, srun --mpi=pmi2).

MPI is initialised here, through the launcher's PMI. Rank 0 then serves a TCPStore for c10d, and
broadcasts its address over MPI. Set MASTER_ADDR if rank 0's host name does not resolve to an
address that the other nodes reach, and MASTER_PORT to choose the port.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous as c10d_rendezvous

from torch_hbmcomm.native import load

# The longest time that a process waits, at its exit, for the other ranks to exit. If they take
# longer, it does not finalise MPI.
_FINALIZE_TIMEOUT = timedelta(seconds=2)

# Variables in which launchers write the number of processes that they started.
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")

# Variables by which a launcher that speaks PMI-1 reaches MPI.
_PMI = ("PMI_FD", "PMI_PORT", "PMI_RANK")

_store: TCPStore | None = None  # the job's store, which serves every group until the process ends
_groups = 0


def rendezvous(
    url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size), as torch.distributed's rendezvous handlers do.

    Raises:
        ValueError: the URL has anything behind mpi://, or a rank or world size was given.
        RuntimeError: MPI cannot be initialised, or a rank did not come before the timeout.
        RuntimeError: the launcher's PMI is not the MPI library's, or the store is out of reach.
    """
    target, _question_mark, query = url.removeprefix("mpi://").partition("?")
    if target or any(not part.endswith("=-1") for part in query.split("&") if part):
        raise ValueError(
            f'init_method="{url}": leave out everything behind mpi://, and rank and world_size: '
            "the launcher sets them"
        )
    yield _over_mpi(timeout, any_port=False)


def as_launched(timeout: timedelta) -> tuple[Store, int, int]:
    """Return (store, rank, world size) as the process's launcher gives them.

    They come from the environment under torchrun, also if srun or mpiexec has started torchrun, and
    under a launcher that sets RANK and WORLD_SIZE without PMI-1. Otherwise they come from MPI:
    without a launcher MPI makes a job of one process. A program that says "mpi" may itself listen
    at MASTER_PORT, which MPI does not need. So rank 0's store then takes any other port.

    Raises the errors of rendezvous(), or of PyTorch's env://.
    """
    has_ranks = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    has_pmi = any(name in os.environ for name in _PMI)
    if not dist.is_torchelastic_launched() and (has_pmi or not has_ranks):
        return _over_mpi(timeout, any_port=True)
    store, rank, size = next(c10d_rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store, rank, size


def _over_mpi(timeout: timedelta, *, any_port: bool) -> tuple[Store, int, int]:
    """Return (store, rank, world size) of the launcher's MPI job.

    any_port: rank 0 may serve the store at another port if MASTER_PORT is in use
    """
    global _store, _groups
    native = load()
    rank, size = native.mpi_launched(timeout)
    asked = "a program that says mpi" if any_port else 'init_method="mpi://"'
    _require_launcher(size, native.mpi_info(), asked)
    if _store is None:
        atexit.register(native.mpi_finalize, _FINALIZE_TIMEOUT)
        _store = _serve(native, timeout, any_port) if rank == 0 else _join(native, timeout)
    _groups += 1
    store = PrefixStore(f"mpi{_groups}", _store)
    store.set_timeout(timeout)
    return store, rank, size


def _require_launcher(size: int, library: dict[str, str], asked: str) -> None:
    """Raise RuntimeError if MPI takes each of several processes for a job of its own. Without this
    error each process would train alone.

    asked: how the program asked for ranks from MPI, for the error
    """
    started = {name: os.environ[name] for name in _SIZES if os.environ.get(name, "1") != "1"}
    if size > 1 or not started:
        return
    name, count = next(iter(started.items()))
    raise RuntimeError(
        f"{asked}: {name}={count} processes were started, but MPI knows of this one alone: the "
        f"launcher does not speak the PMI of {library['version']} ({library['library']}). Start "
        "with that library's mpiexec or, for MPICH, with `srun --mpi=pmi2`; or name the launcher's "
        "MPI in HBMCOMM_MPI_LIB. Under torchrun leave init_method out (see docs/running.md, "
        '"Which MPI library")'
    )


def _serve(native: Any, timeout: timedelta, any_port: bool) -> TCPStore:
    port = os.environ.get("MASTER_PORT", "0")
    try:
        try:
            store = _listen(int(port), timeout)
        except dist.DistNetworkError as error:
            if not any_port:
                raise
            native.info(f"the store listens at another port than MASTER_PORT={port}: {error}")
            store = _listen(0, timeout)
    except Exception as error:
        native.mpi_broadcast(json.dumps({"error": f"MASTER_PORT={port}: {error}"}), timeout)
        raise
    host = os.environ.get("MASTER_ADDR", socket.gethostname())
    address = {"host": host, "port": store.port, "network": _network()}
    native.mpi_broadcast(json.dumps(address), timeout)
    return store


def _listen(port: int, timeout: timedelta) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=True, timeout=timeout, wait_for_workers=False)


def _join(native: Any, timeout: timedelta) -> TCPStore:
    address = json.loads(native.mpi_broadcast("", timeout))
    if "error" in address:
        raise RuntimeError(f"rank 0 could not serve the store: {address['error']}")
    host = "127.0.0.1" if address["network"] == _network() else address["host"]
    try:
        return TCPStore(host, address["port"], is_master=False, timeout=timeout)
    except dist.DistError as error:
        raise RuntimeError(
            f"rank 0's store at {host}:{address['port']} is out of reach from "
            f"{socket.gethostname()}. Set MASTER_ADDR to an address of rank 0's node that this "
            f"node reaches (and MASTER_PORT to an open port): {error}"
        ) from error


def _network() -> str:
    """Return a name that is equal on processes that reach each other at 127.0.0.1."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
