# The native module. Errors: ValueError (bad argument), MemoryError, RuntimeError.
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Backend, ErrorType, Store

class Options:
    """Options of a process group.

    Args:
        memory: the policy of the memory that the group allocates, such as staging memory and DDP's
            buckets. "preferred": the closest high-bandwidth node, or DDR if that node is full or
            absent. "bind": the same node, or an error. "interleave": pages in turn over the
            high-bandwidth nodes. "ddr": ordinary memory. None: HBMCOMM_MEMORY, else "preferred".
        transport: how the ranks reach one another. "auto": shared memory within a node, MPI between
            nodes. "shm": shared memory; a group over several nodes is refused. "mpi": MPI between
            all ranks, on one node too, staged in the memory of `memory`. None: HBMCOMM_NODE,
            else "auto". Must be the same on every rank.
        staging_bytes: bound of the memory that messages over MPI are staged in. None:
            HBMCOMM_STAGING_BYTES, else 1 GiB. Must be the same on every rank.
        reduce_threads: number of threads, 1 to 64, that share a rank's large reductions and copies
            of tensors in segments within a node. A rank uses no more threads than its share of the
            processors: the usable processors divided by the ranks of this machine. Results have the
            same bits for any number. None: HBMCOMM_REDUCE_THREADS, else 1.
        parameter_server: the group's memory boxes, which smb.all_of(group) returns. "auto": rank 0
            serves a box while the group lives, of HBMCOMM_BOX_MEMORY bytes (default: half of the
            machine's memory). "smb://host:port[,host:port...]" or "smb+unix:///path": boxes that
            run already. "": no box. None: HBMCOMM_PARAMETER_SERVER, else "". Every rank names the
            same boxes in the same order, or "auto". A wrong value, or a box that cannot be reached,
            is an error on every rank when the group is formed.
        heartbeat_timeout: seconds, at least 3, after which another machine that does not answer
            counts as lost, with its ranks. The machine's kernel answers, also for a stopped
            process. The group's timeout is the upper bound. None: HBMCOMM_HEARTBEAT_TIMEOUT, else
            the group's timeout.

    Raises:
        ValueError: a value that is not among these
    """

    def __init__(
        self,
        *,
        memory: str | None = None,
        transport: str | None = None,
        staging_bytes: int | None = None,
        reduce_threads: int | None = None,
        parameter_server: str | None = None,
        heartbeat_timeout: float | None = None,
    ) -> None: ...
    @property
    def memory(self) -> str: ...
    @property
    def transport(self) -> str: ...
    @property
    def staging_bytes(self) -> int: ...
    @property
    def reduce_threads(self) -> int: ...
    @property
    def parameter_server(self) -> str: ...
    @property
    def heartbeat_timeout(self) -> float | None: ...

class _GroupResource(Protocol):
    def close(self, patient: bool) -> None: ...

class ProcessGroupHbm(Backend):
    @property
    def options(self) -> Options: ...  # type: ignore[override]
    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...
    def get_error(self) -> ErrorType: ...
    def drop_batch(self) -> None: ...
    # The next four are for a resource of the group, such as its memory boxes: see csrc/pg_hbm.h.
    def gather_texts(self, step: str, tell: Callable[[], str]) -> list[str]: ...
    def networks(self) -> list[str]: ...
    def attach(self, resource: _GroupResource) -> None: ...
    @property
    def resource(self) -> Any: ...

def create(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    options: Options | None,
    name: str,
    global_ranks: list[int],
    backend: str,
) -> Any: ...
def set_mpi_search_path(directories: list[str]) -> None: ...
def set_mpi_trial_program(program: list[str]) -> None: ...
def mpi_info() -> dict[str, str]: ...
def mpi_launched(timeout: timedelta) -> tuple[int, int]: ...
def mpi_broadcast(value: str, timeout: timedelta) -> str: ...
def mpi_finalize(timeout: timedelta) -> None: ...
def warn(message: str) -> None: ...
def info(message: str) -> None: ...
def build_info() -> dict[str, str]: ...
def reduce_isa() -> str: ...
def memory_available() -> bool: ...
def memory_info() -> dict[str, Any]: ...
def install_cpu_allocator(policy: str) -> None: ...
def memory_named_by_user(policy: str) -> None: ...
def memory_empty(shape: list[int], dtype: torch.dtype, policy: str) -> torch.Tensor: ...
def memory_where(address: int, bytes: int) -> dict[int, int]: ...
def memory_bind(mode: str, local_rank: int, local_size: int) -> str: ...

# Error feedback: csrc/error_feedback.h. Tensors are flat, contiguous and in the CPU's memory.
# Gradients and residuals of a call are either all float64, or each float32, bfloat16 or float16.
def error_feedback_accumulate(
    gradients: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor | None],
    after: Sequence[torch.Tensor],
    factor: float,
    squares: bool,
) -> torch.Tensor: ...
def error_feedback_pack(
    residuals: Sequence[torch.Tensor], wire: torch.Tensor, factor: float, inverse: float
) -> None: ...
def error_feedback_unpack(
    wire: torch.Tensor, buffer: torch.Tensor, begins: Sequence[int], counts: Sequence[int]
) -> bool: ...

# Layer dropping: csrc/layerdrop.h.
def layerdrop_threshold(scores: Sequence[float], sizes: Sequence[int], ratio: float) -> float: ...

# Keeps the library's threads out of the interpreter from now on. Called before the interpreter is
# finalised. here=True: the calling thread finalises it. here=False: the main thread finalises it.
def end_interpreter(here: bool) -> None: ...
