"""Compares an all_reduce over TCP links with one over MPI.

    python -m benchmarks.links

Three processes of this machine count as three nodes. Processes 0 and 1 form groups over MPI.
Process 2 has no MPI, so processes 0 and 2 form groups over TCP links (csrc/communicator/tcp). The
groups alternate in rounds, and the process that is not in a group sleeps. Each table entry is the
time of a call on process 0, from all rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch._C._distributed_c10d import FileStore

import torch_hbmcomm  # noqa: F401  (registers the backend)
from torch_hbmcomm.bench import report

SIZES = [8, 512, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
PARTNERS = {"mpi": 1, "links": 2}

app = typer.Typer(add_completion=False)


def measure(size: int, seconds: float) -> list[float]:
    """Return the times of calls, in microseconds, that together take some `seconds`."""
    data = torch.zeros(size // 4)
    for _ in range(3):
        dist.all_reduce(data)
    begin = time.perf_counter()
    dist.all_reduce(data)
    calls = torch.tensor([max(5, int(seconds / (time.perf_counter() - begin)))])
    dist.broadcast(calls, 0)
    times = []
    for _ in range(min(int(calls), 5000)):
        begin = time.perf_counter()
        dist.all_reduce(data)
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def serve(pipe: Connection, number: int, folder: Path) -> None:
    """Measure in the groups whose names come over the pipe."""
    os.environ["HBMCOMM_NODE_ID"] = str(number)
    torch.set_num_threads(1)
    while message := pipe.recv():
        name, seconds = message
        store = FileStore(str(folder / name), 2)
        dist.init_process_group("hbm", store=store, rank=min(number, 1), world_size=2)
        pipe.send([measure(size, seconds) for size in SIZES])
        dist.destroy_process_group()


@app.command()
def main(
    rounds: Annotated[int, typer.Option(help="groups of each kind")] = 5,
    seconds: Annotated[float, typer.Option(help="time for each size in a round")] = 0.2,
) -> None:
    """Measure all_reduce of 8 B to 16 MiB."""
    spawned = multiprocessing.get_context("spawn")
    times: dict[str, list[list[float]]] = {kind: [[] for _ in SIZES] for kind in PARTNERS}
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        processes = []
        for number in range(3):
            ours, theirs = spawned.Pipe()
            process = spawned.Process(
                target=serve, args=(theirs, number, Path(folder)), daemon=True
            )
            process.start()
            processes.append(process)
            pipes.append(ours)
        for turn in range(rounds):
            for kind, partner in PARTNERS.items():
                for pipe in (pipes[0], pipes[partner]):
                    pipe.send((f"{kind}{turn}", seconds))
                found = pipes[0].recv()
                pipes[partner].recv()
                for all_times, new in zip(times[kind], found, strict=True):
                    all_times.extend(new)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()
    table = Table("bytes", "MPI, µs (least)", "links, µs (least)", "links / MPI (least)")
    for size, mpi, links in zip(SIZES, times["mpi"], times["links"], strict=True):
        medians = [statistics.median(each) for each in (mpi, links)]
        least = [min(each) for each in (mpi, links)]
        table.add_row(
            f"{size:,}",
            *(f"{a:,.1f} ({b:,.1f})" for a, b in zip(medians, least, strict=True)),
            f"{medians[1] / medians[0]:.2f} ({least[1] / least[0]:.2f})",
        )
    report.show(table)


if __name__ == "__main__":
    app()
