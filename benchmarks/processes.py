"""Starts the processes of MPI and of PyTorch's RPC."""

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch_hbmcomm.bench.peer import Peer, peers
from torch_hbmcomm.bench.result import Unavailable

OVER_TCP = {
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
}
"""The environment of MPI's ranks that share no memory. Of MPICH's two transports over tcp, OFI was
faster here. With UCX, ranks in two network namespaces lost messages."""


@contextmanager
def mpi_ranks(
    role: str, count: int, environment: Mapping[str, str], launcher: Sequence[str] = ()
) -> Iterator[list[Peer]]:
    """Start the ranks of an MPI job. Raises Unavailable.

    launcher: words to put before the command of each rank.
    """
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if importlib.util.find_spec("mpi4py") is None:
        raise Unavailable("mpi4py is not installed: pip install mpi4py")
    if not mpiexec.exists():
        raise Unavailable(f"{mpiexec} does not exist: pip install mpich")
    with peers(role, count, [str(mpiexec), "-n", str(count), *launcher], environment) as ranks:
        yield ranks


@contextmanager
def rpc_ranks(
    role: str,
    count: int,
    launcher: Callable[[int], Sequence[str]] = lambda rank: (),
    **options: object,
) -> Iterator[list[Peer]]:
    """Start ranks that join a job of PyTorch's RPC or of torch.distributed.

    Each rank finds its number in the environment variable RANK. Its `join` gets `store_file`, the
    path of a file that does not exist yet; `world`, the number of ranks; and `options`.

    launcher: returns the words to put before the command of a rank.

    Raises Unavailable.
    """
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("PyTorch is not installed")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hbmcomm-bench-"))
        with ThreadPoolExecutor(count) as threads:  # a process takes seconds to start
            starts = (peers(role, 1, launcher(rank), {"RANK": str(rank)}) for rank in range(count))
            ranks = [rank for (rank,) in threads.map(stack.enter_context, starts)]
        for rank in ranks:
            rank.tell("join", store_file=f"{folder}/store", world=count, **options)
        for rank in ranks:
            rank.answer()
        yield ranks
