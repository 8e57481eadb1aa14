"""The script of the bootstrap tests: each rank forms the group, uses it, and prints one line."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--init-method", default="env://")
    parser.add_argument("--fail-rank", type=int, default=-1, help="this rank raises")
    parser.add_argument("--mpi4py-first", action="store_true")
    parser.add_argument("--keep", action="store_true", help="do not destroy the group")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.mpi4py_first:
        # MPICH keeps a file of a single process in /dev/shm until MPI_Finalize, which mpi4py calls
        # at exit. So this rank must exit normally, even if the other rank fails and the launcher
        # sends SIGTERM.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # must not end the exit
        from mpi4py import MPI

        assert MPI.COMM_WORLD.Get_size() >= 1
    backend = os.environ["HBMCOMM_TEST_BACKEND"]
    timeout = timedelta(seconds=600)  # longer than any test waits for the job
    dist.init_process_group(backend, init_method=arguments.init_method, timeout=timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 100_000):
        data = torch.full((count,), rank + 1.0)
        dist.all_reduce(data)
        assert (data == size * (size + 1) / 2).all(), data
    if rank == arguments.fail_rank:
        raise RuntimeError("this rank fails as requested")
    if arguments.fail_rank >= 0:
        dist.all_reduce(torch.ones(1))  # the failed rank never joins
    print(f"rank {rank} of {size} done", flush=True)
    if not arguments.keep:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
