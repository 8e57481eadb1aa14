"""Makes process groups, for init_process_group("hbm") and new_group(backend="hbm")."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any

from torch_hbmcomm.coalescing import clear_after_errors
from torch_hbmcomm.native import load
from torch_hbmcomm.variables import first_use, value

_C = load()

Options = _C.Options


def create(distributed_options: Any, group_options: Any, name: str = "hbm") -> Any:
    """Make the backend of one group, which reports `name` as its name.

    torch.distributed calls it with the arguments of a backend registered with extended_api=True.

    Raises:
        ValueError: options of another backend, or a wrong environment variable.
        DistBackendError: a rank did not come before the timeout.
        RuntimeError: the group needs MPI, and there is no MPI library that hbm can use.
        Exception: an error of smb.Server or smb.connect, if the options ask for a memory box.
    """
    ranks = distributed_options.global_ranks_in_group
    rank = distributed_options.group_rank
    first_use(ranks[rank] if ranks else rank)
    if value("HBMCOMM_PROFILE") or value("HBMCOMM_METRICS"):
        from torch_hbmcomm.profiling import start_if_asked  # here: most processes do not need it

        start_if_asked()
    check_options(group_options)
    # With "0", DDP asks the group for its buckets' memory, which other ranks of the node can read.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    clear_after_errors()
    timeout = _milliseconds(distributed_options.timeout)
    backend = _C.create(
        store=distributed_options.store,
        rank=distributed_options.group_rank,
        size=distributed_options.group_size,
        timeout=timeout,
        options=group_options,
        name=distributed_options.group_id,
        global_ranks=distributed_options.global_ranks_in_group,
        backend=name,
        # Absent before PyTorch 2.14.
        enable_reconfigure=getattr(distributed_options, "enable_reconfigure", False),
    )
    if backend.options.parameter_server:
        from torch_hbmcomm.group_boxes import provide

        provide(backend, timeout)
    return backend


def check_options(group_options: Any) -> None:
    """Raise ValueError if a program passes something else for `pg_options`."""
    if group_options is None or isinstance(group_options, Options):
        return
    raise ValueError(
        "pg_options for the backend hbm must be torch_hbmcomm.Options, not "
        f"{type(group_options).__module__}.{type(group_options).__qualname__}"
    )


def _milliseconds(timeout: timedelta) -> timedelta:
    """Round to the nearest millisecond, because PyTorch's options hold seconds as a float32: 5.7 s
    come back as 5.699999 s."""
    return timedelta(milliseconds=math.ceil(timeout / timedelta(milliseconds=1) - 0.5))
