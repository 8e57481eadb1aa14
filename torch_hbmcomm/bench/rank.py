"""What runs in each rank. The parent combines what the ranks return."""

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.distributed.rendezvous import rendezvous

from torch_hbmcomm.bench.collectives import Operation
from torch_hbmcomm.bench.contenders import CONTENDERS
from torch_hbmcomm.bench.sizes import format_bytes

_BLOCK_SECONDS = 5e-3  # long against the skew with which ranks leave a barrier
_MOST_CALLS = 1000


@dataclass(frozen=True)
class Cell:
    """One row of the report: every contender does this."""

    collective: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.collective} of {format_bytes(self.bytes)}" if self.bytes else self.collective


Samples = dict[tuple[Cell, str], list[float]]  # (cell, contender): microseconds a call, by round


def measure(names: Sequence[str], cells: Sequence[Cell], rounds: int) -> Samples:
    """In every round, each contender in turn does a block of calls after a common barrier."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # the control group: barriers and block lengths, never timed
    for name in names:
        CONTENDERS[name].open()
    samples: Samples = {}
    for cell in _with_progress(cells):
        for name, times in _measure_cell(cell, names, rounds).items():
            samples[cell, name] = times
    dist.barrier()
    dist.destroy_process_group()
    return samples


def _with_progress(cells: Sequence[Cell]) -> Iterable[Cell]:
    """On rank 0's terminal. Drawn between cells alone: a thread that draws would be measured."""
    terminal = Console(stderr=True)
    hidden = dist.get_rank() != 0 or not terminal.is_terminal
    return track(cells, auto_refresh=False, console=terminal, transient=True, disable=hidden)


def _measure_cell(cell: Cell, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    blocks = {}
    for name in names:
        try:
            operation = CONTENDERS[name].prepare(cell.collective, cell.bytes)
            blocks[name] = (operation, _block_length(operation))
        except Exception as error:
            raise RuntimeError(f"{cell} on {name}: {error}") from error
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.disable()
    for _ in range(rounds):
        for name, (operation, calls) in blocks.items():
            dist.barrier()
            operation()  # brings this contender's buffers and threads back to work
            times[name].append(_seconds(operation, calls) / calls * 1e6)
    gc.enable()
    return times


def _block_length(operation: Operation) -> int:
    """How many calls fill a block: rank 0's answer, which every rank gets."""
    operation()
    dist.barrier()
    estimate = _seconds(operation, 3) / 3
    calls = torch.tensor(max(1, min(_MOST_CALLS, int(_BLOCK_SECONDS / estimate))))
    dist.broadcast(calls, src=0)
    return int(calls)


def _seconds(operation: Operation, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        operation()
    return time.perf_counter() - start


def startup(name: str) -> float:
    """Microseconds from nothing to the end of a first collective, once all ranks have come up."""
    torch.set_num_threads(1)
    _meet()
    start = time.perf_counter()
    CONTENDERS[name].start()
    elapsed = time.perf_counter() - start
    dist.barrier()
    dist.destroy_process_group()
    return elapsed * 1e6


def _meet() -> None:
    """Ranks leave together, so that what one rank's imports took is in nobody's time."""
    store, rank, ranks = next(rendezvous("env://"))
    store.set(f"bench/arrived/{rank}", "")
    store.wait([f"bench/arrived/{peer}" for peer in range(ranks)])
