"""Measures allreduce with too few processors: many ranks, or other processes that compute.

    python -m benchmarks.collectives.busy --json busy.json

hbm and Gloo alternate in the same ranks. A sample is the time of a block of operations on the
slowest rank, from the first call to the last result, divided by the number of operations. There are
four ways to issue the operations:

    single   one after the other, each waited for (async_op=False)
    window   asynchronously, at most `--window` in flight
    bulk     all asynchronously, then wait() of each
    futures  all asynchronously, each followed by get_future(), then a wait for each future; as
             DDP's hooks and torch.distributed's own tests do it

The other processes that compute are shell loops, with the same priority as the ranks. The table
also has the context switches per operation, voluntary and involuntary, summed over all ranks
(getrusage).
"""

import resource
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import RenderableType
from rich.text import Text

from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.contenders import group_of_all
from torch_hbmcomm.bench.ranks import join, launch, leave, with_progress
from torch_hbmcomm.bench.report import Json, check_file, fail, finish, names
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    check_counts,
    check_names,
    describe_machine,
    sampled,
)
from torch_hbmcomm.sizes import KIB, parse_bytes

_MOST = 3600  # seconds of processor time, then a busy process ends: the benchmark was killed
_FEWEST = 10  # operations in a block

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

BACKENDS = {"hbm": "hbm, on plain tensors", "gloo": "PyTorch's own backend"}

Block = Callable[[dist.ProcessGroup, Sequence[torch.Tensor], int], None]


def _single(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], window: int) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def _window(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], window: int) -> None:
    in_flight: deque[dist.Work] = deque()
    for tensor in tensors:
        if len(in_flight) == window:
            in_flight.popleft().wait()
        in_flight.append(_issue(group, tensor))
    for work in in_flight:
        work.wait()


def _bulk(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], window: int) -> None:
    for work in [_issue(group, tensor) for tensor in tensors]:
        work.wait()


def _futures(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], window: int) -> None:
    for future in [_issue(group, tensor).get_future() for tensor in tensors]:
        future.wait()


def _issue(group: dist.ProcessGroup, tensor: torch.Tensor) -> dist.Work:
    work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work


WAYS: dict[str, Block] = {
    "single": _single,
    "window": _window,
    "bulk": _bulk,
    "futures": _futures,
}


@dataclass(frozen=True)
class Cell:
    busy: int  # processes that compute
    way: str
    bytes: int
    operations: int  # in a block


@dataclass(frozen=True)
class BusyPlan:
    """A choice of measurements. Raises ValueError for an unknown way or too small a number.

    operations: number in a block, for tensors of up to 4 KiB; blocks of larger tensors have fewer.
    """

    ranks: Sequence[int]
    busy: Sequence[int]
    sizes: Sequence[int]
    ways: Sequence[str]
    operations: int
    window: int
    rounds: int

    def __post_init__(self) -> None:
        check_names("way", self.ways, WAYS)
        check_counts(self, {"operations": 1, "window": 1, "rounds": 1})

    def cells(self) -> list[Cell]:
        return [
            Cell(busy, way, size, max(_FEWEST, min(self.operations, self._operations(size))))
            for busy, way, size in product(self.busy, self.ways, self.sizes)
        ]

    def _operations(self, size: int) -> int:
        return int(self.operations * (4 * KIB / size) ** 0.5)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    # Not timeout(1): if SIGTERM comes right after its fork, it leaves its command running.
    command = ["sh", "-c", f"ulimit -t {_MOST}; while :; do :; done"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _measure(plan: BusyPlan) -> list[dict[str, list[tuple[float, int]]]]:
    """Measure all cells on one rank. Return, by cell, the seconds and switches of each block."""
    join()
    for backend in BACKENDS:
        group_of_all(backend)
    found = [_measure_cell(cell, plan) for cell in with_progress(plan.cells())]
    leave()
    return found


def _measure_cell(cell: Cell, plan: BusyPlan) -> dict[str, list[tuple[float, int]]]:
    tensors = [torch.empty(max(1, cell.bytes // 4)) for _ in range(cell.operations)]
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in BACKENDS}
    with busy_processes(cell.busy if dist.get_rank() == 0 else 0):
        for name in BACKENDS:  # warm-up
            _block(group_of_all(name), tensors[:_FEWEST], cell, plan.window)
        for _ in range(plan.rounds):
            for name in BACKENDS:
                found[name].append(_block(group_of_all(name), tensors, cell, plan.window))
        dist.barrier()
    return found


def _block(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], cell: Cell, window: int
) -> tuple[float, int]:
    for index, tensor in enumerate(tensors):
        tensor.fill_(index + dist.get_rank())
    dist.barrier()
    switches = _switches()
    start = time.perf_counter()
    WAYS[cell.way](group, tensors, window)
    seconds = time.perf_counter() - start
    ranks = dist.get_world_size()
    for index, tensor in enumerate(tensors):
        expected = index * ranks + ranks * (ranks - 1) // 2
        if not (tensor == expected).all():
            raise RuntimeError(f"{cell}: operation {index} has a wrong result, not {expected}")
    return seconds, _switches() - switches


def _switches() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


def run(plan: BusyPlan) -> Result:
    """Measure. Raises RuntimeError when a rank fails."""
    found = []
    for ranks in plan.ranks:
        of_ranks = launch(ranks, _measure, plan)
        for cell, *blocks in zip(plan.cells(), *of_ranks, strict=True):
            of = {"ranks": ranks, "busy": cell.busy, "way": cell.way, "bytes": cell.bytes}
            for name in BACKENDS:
                found.append(_measurement(of, name, [own[name] for own in blocks], cell.operations))
    return Result(
        benchmark="busy",
        machine=describe_machine(),
        plan={"rounds": plan.rounds, "operations": plan.operations, "window": plan.window},
        contenders=BACKENDS,
        measurements=found,
    )


def _measurement(
    of: dict[str, Any],
    contender: str,
    of_ranks: Sequence[Sequence[tuple[float, int]]],
    operations: int,
) -> Measurement:
    times = [max(seconds for seconds, _ in turn) for turn in zip(*of_ranks, strict=True)]
    switches = sum(count for blocks in of_ranks for _, count in blocks)
    return sampled(
        of,
        contender,
        [seconds / operations * 1e6 for seconds in times],
        calls_per_sample=operations,
        values={"switches": round(switches / operations / len(times), 2)},
    )


def render(result: Result) -> RenderableType:
    """Return a table for each number of ranks: times of an operation, and ratios to hbm's."""

    def entry(row: report.Row, one: Measurement) -> Text:
        text = report.compared_with(one, row["hbm"], reference=False)
        return text.append(f"\n{one.values['switches']:.1f} switches")

    headings = {
        "busy": lambda one: str(one.of["busy"]),
        "way": lambda one: str(one.of["way"]),
        "size": report.size,
    }
    tables: list[RenderableType] = []
    for ranks in dict.fromkeys(one.of["ranks"] for one in result.measurements):
        rows = [one for one in result.measurements if one.of["ranks"] == ranks]
        tables.append(report.compared(f"{ranks} ranks: an allreduce", rows, headings, entry))
    return report.group(tables, result)


@app.command()
def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "4,8",
    busy: Annotated[str, typer.Option(help="Numbers of processes that compute.")] = "0,4",
    sizes: Annotated[str, typer.Option(help="Sizes, as in 8,64KiB,1MiB.")] = "8,64KiB",
    ways: Annotated[str, typer.Option(help="Ways to issue operations.")] = ",".join(WAYS),
    operations: Annotated[int, typer.Option(help="In a block; fewer above 4 KiB.")] = 300,
    window: Annotated[int, typer.Option(help="Most operations in flight.")] = 16,
    rounds: Annotated[int, typer.Option(help="Blocks of each contender.")] = 5,
    json: Json = None,
) -> None:
    """Measure allreduce of float32 over hbm and Gloo with too few processors.

    The exit status never depends on a time.
    """
    check_file(json)
    try:
        plan = BusyPlan(
            ranks=[int(count) for count in names(ranks)],
            busy=[int(count) for count in names(busy)],
            sizes=[parse_bytes(size) for size in names(sizes)],
            ways=names(ways),
            operations=operations,
            window=window,
            rounds=rounds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = run(plan)
    except RuntimeError as error:
        fail(str(error))
    finish(render(result), result, json)


if __name__ == "__main__":
    app()
