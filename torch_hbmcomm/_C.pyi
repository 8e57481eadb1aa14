# The native module. Errors: ValueError (bad argument), MemoryError, RuntimeError.
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, ErrorType, Store

class Options:
    """What a user may choose for a group.

    Args:
        memory: where staging memory and tensors of the group come from: "preferred" (the closest
            high-bandwidth node, DDR when it is full or absent), "bind" (an error instead),
            "interleave" (over the high-bandwidth nodes) or "ddr". Default: HBMCOMM_MEMORY, else
            "preferred".
        staging_bytes: bound of the memory that messages are staged in. Default:
            HBMCOMM_STAGING_BYTES, else 1 GiB. Must be the same on every rank.
        reduce_threads: None or 1 in this version: the thread that drives an operation reduces.
        parameter_server: None in this version.

    Raises:
        ValueError: a value that makes no sense, or that this version does not have
    """

    def __init__(
        self,
        *,
        memory: str | None = None,
        staging_bytes: int | None = None,
        reduce_threads: int | None = None,
        parameter_server: str | None = None,
    ) -> None: ...
    @property
    def memory(self) -> str: ...
    @property
    def staging_bytes(self) -> int: ...

class ProcessGroupHbm(Backend):
    @property
    def options(self) -> Options: ...  # type: ignore[override]
    def get_error(self) -> ErrorType: ...
    def memory_stats(self) -> dict[str, int]: ...

def create(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    options: Options | None,
    name: str,
    global_ranks: list[int],
) -> Any: ...
def set_mpi_search_path(directories: list[str]) -> None: ...
def mpi_info() -> dict[str, str]: ...
def mpi_launched(timeout: timedelta) -> tuple[int, int]: ...
def mpi_broadcast(value: str, timeout: timedelta) -> str: ...
def mpi_finalize(patience: timedelta) -> None: ...
def build_info() -> dict[str, str]: ...
def reduce_isa() -> str: ...
def memory_available() -> bool: ...
def memory_info() -> dict[str, Any]: ...
def memory_empty(shape: list[int], dtype: torch.dtype, policy: str) -> torch.Tensor: ...
def memory_where(address: int, bytes: int) -> dict[int, int]: ...
def memory_bind(mode: str, local_rank: int, local_size: int) -> str: ...
