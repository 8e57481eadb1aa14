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

from torch_hbmcomm.native import load

# The longest time that a process waits, at its exit, for the other ranks to exit. If they take
# longer, it does not finalise MPI.
_FINALIZE_TIMEOUT = timedelta(seconds=2)

# Variables in which launchers write the number of processes that they started.
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")

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
    global _store, _groups
    target, _question_mark, query = url.removeprefix("mpi://").partition("?")
    if target or any(not part.endswith("=-1") for part in query.split("&") if part):
        raise ValueError(
            f'init_method="{url}": leave out everything behind mpi://, and rank and world_size: '
            "the launcher sets them"
        )
    native = load()
    rank, size = native.mpi_launched(timeout)
    _require_launcher(size, native.mpi_info())
    if _store is None:
        atexit.register(native.mpi_finalize, _FINALIZE_TIMEOUT)
        _store = _serve(native, timeout) if rank == 0 else _join(native, timeout)
    _groups += 1
    store = PrefixStore(f"mpi{_groups}", _store)
    store.set_timeout(timeout)
    yield store, rank, size


def _require_launcher(size: int, library: dict[str, str]) -> None:
    """Raise RuntimeError if MPI takes each of several processes for a job of its own. Without this
    error each process would train alone."""
    started = {name: os.environ[name] for name in _SIZES if os.environ.get(name, "1") != "1"}
    if size > 1 or not started:
        return
    name, count = next(iter(started.items()))
    raise RuntimeError(
        f'init_method="mpi://": {name}={count} processes were started, but MPI knows of this one '
        f"alone: the launcher does not speak the PMI of {library['version']} "
        f"({library['library']}). Start with that library's mpiexec or, for MPICH, with "
        "`srun --mpi=pmi2`; or name the launcher's MPI in HBMCOMM_MPI_LIB. Under torchrun leave "
        'init_method out (see docs/running.md, "Which MPI library")'
    )


def _serve(native: Any, timeout: timedelta) -> TCPStore:
    port = os.environ.get("MASTER_PORT", "0")
    try:
        store = TCPStore(
            "127.0.0.1", int(port), is_master=True, timeout=timeout, wait_for_workers=False
        )
    except Exception as error:
        native.mpi_broadcast(json.dumps({"error": f"MASTER_PORT={port}: {error}"}), timeout)
        raise
    host = os.environ.get("MASTER_ADDR", socket.gethostname())
    address = {"host": host, "port": store.port, "network": _network()}
    native.mpi_broadcast(json.dumps(address), timeout)
    return store


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
