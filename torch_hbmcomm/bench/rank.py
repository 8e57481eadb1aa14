"""What runs in each rank. The parent combines what the ranks return."""

import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.distributed.rendezvous import rendezvous

from torch_hbmcomm import memory
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.check import check
from torch_hbmcomm.bench.collectives import Cell
from torch_hbmcomm.bench.contenders import CONTENDERS
from torch_hbmcomm.bench.interleave import Samples, interleave


def measure(names: Sequence[str], cells: Sequence[Cell], rounds: int) -> list[Samples]:
    """The samples of each cell, in the order of the cells."""
    join()
    for name in names:
        try:
            CONTENDERS[name].open()
        except Exception as error:
            raise RuntimeError(f"{name} does not get ready: {error}") from error
    samples = [_measure_cell(cell, names, rounds) for cell in with_progress(cells)]
    leave()
    return samples


def _measure_cell(cell: Cell, names: Sequence[str], rounds: int) -> Samples:
    ranks = dist.get_world_size()
    plain = Buffers(torch.empty, cell.bytes, cell.dtype, ranks)
    placed = Buffers(memory.empty, cell.bytes, cell.dtype, ranks)
    loops = {}
    for name in names:
        contender = CONTENDERS[name]
        if not contender.offers(cell):
            continue
        buffers = placed if contender.placed else plain
        try:
            loops[name] = contender.prepare(cell, buffers)
            if not contender.reference:
                check(cell, loops[name], buffers)
        except Exception as error:
            raise RuntimeError(f"{cell} on {name}: {error}") from error
    return interleave(loops, rounds)


def startup(name: str) -> float:
    """Microseconds from nothing to the end of a first collective, once all ranks have come up."""
    torch.set_num_threads(1)
    _meet()
    start = time.perf_counter()
    CONTENDERS[name].start()
    elapsed = time.perf_counter() - start
    leave()
    return elapsed * 1e6


def join() -> None:
    """The control group: barriers and block lengths, never timed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def with_progress(cells: Sequence[Cell]) -> Iterable[Cell]:
    """On rank 0's terminal. Drawn between cells alone: a thread that draws would be measured."""
    terminal = Console(stderr=True)
    hidden = dist.get_rank() != 0 or not terminal.is_terminal
    return track(cells, auto_refresh=False, console=terminal, transient=True, disable=hidden)


def _meet() -> None:
    """Ranks leave together, so that what one rank's imports took is in nobody's time."""
    store, rank, ranks = next(rendezvous("env://"))
    store.set(f"bench/arrived/{rank}", "")
    store.wait([f"bench/arrived/{peer}" for peer in range(ranks)])
