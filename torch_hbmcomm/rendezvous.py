"""init_method="mpi://": the launcher (mpiexec, srun) says who the ranks are.

MPI is initialised here, through the launcher's PMI. Rank 0 then serves a TCPStore, as c10d needs
one, and tells the others its address over MPI. Set MASTER_ADDR where rank 0's host name does not
resolve to an address that the other nodes reach, and MASTER_PORT to choose the port.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_hbmcomm.native import load

_PATIENCE = timedelta(seconds=2)  # for the other ranks to end, before MPI is left as it is
_stores = 0


def rendezvous(
    url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Yields (store, rank, world size), as torch.distributed's rendezvous handlers do.

    Raises RuntimeError when MPI cannot be initialised, and ValueError for a URL with anything
    behind mpi://.
    """
    global _stores
    given = url.removeprefix("mpi://").partition("?")
    if given[0] or any(not part.endswith("=-1") for part in given[2].split("&") if part):
        raise ValueError(
            f'init_method="{url}": nothing may follow mpi://, and neither rank nor world_size be '
            "given: the launcher knows them"
        )
    native = load()
    rank, size = native.mpi_launched()
    if _stores == 0:
        atexit.register(native.mpi_finalize, _PATIENCE)
    store = _serve(timeout) if rank == 0 else None
    address = json.loads(native.mpi_broadcast(_address(store) if store else ""))
    if store is None:
        same_host = address["host"] == socket.gethostname()
        name = "127.0.0.1" if same_host else address["address"]
        store = dist.TCPStore(name, address["port"], is_master=False, timeout=timeout)
    _stores += 1
    yield dist.PrefixStore(f"mpi{_stores}", store), rank, size


def _serve(timeout: timedelta) -> dist.TCPStore:
    port = int(os.environ.get("MASTER_PORT", "0"))
    return dist.TCPStore("0.0.0.0", port, is_master=True, timeout=timeout, wait_for_workers=False)


def _address(store: dist.TCPStore) -> str:
    host = socket.gethostname()
    address = os.environ.get("MASTER_ADDR", host)
    return json.dumps({"host": host, "address": address, "port": store.port})
