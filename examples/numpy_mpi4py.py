"""NumPy arrays in high-bandwidth memory as buffers of mpi4py, compared with pickled objects.

mpi4py has two interfaces: `comm.Bcast(array)` passes the array's memory to MPI, `comm.bcast(array)`
pickles the array. This program times both for broadcast, gather and allreduce. Its arrays come from
hbmcomm.memory.empty_numpy, which places them in high-bandwidth memory, or in DDR if there is none.

    mpiexec -n 2 python examples/numpy_mpi4py.py
"""

import argparse
import sys
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import torch_hbmcomm as hbmcomm

Array = NDArray[np.float32]
REPEAT = 5


def array(*shape: int, value: float) -> Array:
    made: Array = hbmcomm.memory.empty_numpy(shape, np.float32)
    made.fill(value)
    return made


def best_ms(comm: MPI.Comm, operation: Callable[[], object]) -> float:
    """Return the shortest time of REPEAT runs. A run takes as long as its slowest rank."""
    times = []
    for _ in range(REPEAT):
        comm.Barrier()
        start = MPI.Wtime()
        operation()
        times.append(comm.allreduce(MPI.Wtime() - start, MPI.MAX))
    return 1000 * float(min(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=16, help="size of the array of each rank")
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    numel = args.mib * 2**20 // 4
    own = array(numel, value=rank + 1)
    sent = own if rank == 0 else array(numel, value=0)  # receives rank 0's array
    gathered = array(size, numel, value=0) if rank == 0 else None
    total = array(numel, value=0)

    operations: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "broadcast": (lambda: comm.Bcast(sent), lambda: comm.bcast(own)),
        "gather": (lambda: comm.Gather(own, gathered), lambda: comm.gather(own)),
        "allreduce": (lambda: comm.Allreduce(own, total), lambda: comm.allreduce(own)),
    }
    table = Table("operation", title=f"{args.mib} MiB on {size} ranks", title_justify="left")
    for heading in ("as buffers", "as objects", "factor"):
        table.add_column(heading, justify="right")
    for name, ways in operations.items():
        buffers, objects = (best_ms(comm, operation) for operation in ways)
        table.add_row(name, f"{buffers:.1f} ms", f"{objects:.1f} ms", f"{objects / buffers:.1f}")

    good = (
        bool((sent == 1).all())
        and (gathered is None or all((row == i + 1).all() for i, row in enumerate(gathered)))
        and bool((total == size * (size + 1) / 2).all())
    )
    good = comm.allreduce(good, MPI.LAND)
    if rank == 0:
        for node, held in hbmcomm.memory.where(own).items():
            print(f"{held / 2**20:.0f} MiB of rank 0's array are on NUMA node {node}")
        Console().print(table)
        print("OK: all results are right" if good else "FAILED: wrong results")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
