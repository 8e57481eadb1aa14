"""Measures collectives of hbm, Gloo, MPI and others in one set of ranks, and their startups.

A size is the larger buffer of a rank, in bytes. That is the whole tensor of allreduce, broadcast,
reduce and sendrecv, and either side of alltoall. It is the gathered side of allgather and gather,
and the scattered side of scatter and reduce_scatter. Rank 0 is the root. Operators are sums.
sendrecv is a ping-pong of the pairs (0, 1), (2, 3), ...: one call sends a message there and back.
An odd last rank idles.

"startup" is the time of init_process_group and a first collective, in fresh processes that have
imported torch. "startup" and "barrier" have the size 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import RenderableType
from rich.text import Text

from torch_hbmcomm import memory
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.contenders import (
    COLLECTIVE_CALLS,
    DTYPES,
    OVER_MPI,
    Contender,
    Hbm,
    Nothing,
    TorchBackend,
)
from torch_hbmcomm.bench.mpich import Mpich
from torch_hbmcomm.bench.ranks import (
    join,
    launch,
    leave,
    seconds_after_barrier,
    slowest,
    take_turns,
    with_progress,
)
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    check_counts,
    check_names,
    describe_machine,
    measurements,
    sampled,
)
from torch_hbmcomm.bench.rounds import Samples
from torch_hbmcomm.sizes import KIB, MIB, format_bytes

T = TypeVar("T")

_LARGE = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_LATENCY_SIZES = (8, 512, 4 * KIB, 16 * KIB, 64 * KIB)
_STARTUP = {"collective": "startup", "dtype": "float32", "bytes": 0}


@dataclass(frozen=True)
class Collective:
    name: str
    default_sizes: Sequence[int] = _LARGE  # empty for a collective that moves no data
    divided: bool = False  # the larger buffer holds one equal share for each rank

    def bytes_near(self, asked: int, ranks: int, dtype: str) -> int:
        """Return the least possible size that is at least `asked`."""
        element: int = getattr(torch, dtype).itemsize
        step = element * (ranks if self.divided else 1)
        return -(-asked // step) * step


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("allreduce", (*_LATENCY_SIZES, 256 * KIB, *_LARGE, 256 * MIB)),
        Collective("broadcast"),
        Collective("reduce"),
        Collective("allgather", divided=True),
        Collective("gather", divided=True),
        Collective("scatter", divided=True),
        Collective("reduce_scatter", divided=True),
        Collective("alltoall", divided=True),
        Collective("barrier", default_sizes=()),
        Collective("sendrecv"),
    )
}
assert COLLECTIVES.keys() == COLLECTIVE_CALLS.keys()

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Hbm("hbm-zero-copy", "hbm, on tensors from hbmcomm.memory.empty", zero_copy=True),
        Hbm("hbm-staged", "hbm, on plain tensors"),
        Hbm("hbm-mpi", "hbm with HBMCOMM_NODE=mpi, on plain tensors", node=OVER_MPI),
        TorchBackend("gloo", "PyTorch's own backend", "gloo"),
        Mpich(),
        Nothing("nothing", "a backend that does nothing: what calling one costs", "fake"),
    )
}


@dataclass(frozen=True)
class Cell:
    """One row of the report: a collective, type and size."""

    collective: str
    dtype: str
    bytes: int  # 0: no data

    def __str__(self) -> str:
        if not self.bytes:
            return self.collective
        return f"{self.collective} of {format_bytes(self.bytes)} of {self.dtype}"

    def offered_by(self, contender: Contender) -> bool:
        return contender.offers(self.collective, self.dtype, self.bytes)


@dataclass(frozen=True)
class CollectivesPlan:
    """A choice of contenders and rows.

    contenders: the first is compared with the others.
    sizes: the sizes of every collective, in bytes; None: each collective's own default_sizes.
    startup_rounds: 0 leaves startup out.

    Raises ValueError for a type that does not exist, or a count below its minimum.
    """

    contenders: Sequence[Contender] = tuple(CONTENDERS.values())
    collectives: Sequence[Collective] = tuple(COLLECTIVES.values())
    sizes: Sequence[int] | None = None
    dtypes: Sequence[str] = ("float32",)
    ranks: int = 2
    rounds: int = 21
    startup_rounds: int = 3

    def __post_init__(self) -> None:
        check_names("dtype", self.dtypes, DTYPES)
        check_counts(self, {"ranks": 2, "rounds": 1, "startup_rounds": 0})

    def cells(self) -> list[Cell]:
        return [cell for collective in self.collectives for cell in self._cells(collective)]

    def _cells(self, collective: Collective) -> list[Cell]:
        """Return the cells of a collective. Sizes that bytes_near() makes equal have one cell."""
        if not collective.default_sizes:
            return [Cell(collective.name, self.dtypes[0], 0)]
        sizes = collective.default_sizes if self.sizes is None else self.sizes
        found = [
            Cell(collective.name, dtype, collective.bytes_near(size, self.ranks, dtype))
            for dtype in self.dtypes
            for size in sizes
        ]
        return list(dict.fromkeys(found))

    def unavailable(self) -> dict[str, str]:
        """Return the contenders that cannot run here, each with the cause. Takes a while, because
        some contenders are compiled to find out."""
        found = {}
        for contender in self.contenders:
            if set(contender.dtypes).isdisjoint(self.dtypes):
                found[contender.name] = _takes(contender)
            elif (cause := contender.why_unavailable()) is not None:
                found[contender.name] = cause
        return found


def chosen(kind: str, asked: str, known: Mapping[str, T]) -> list[T]:
    """Return the entries of `known` that `asked` names. asked: names separated by commas, or "all"
    for every entry. Raises ValueError for an unknown name."""
    found = list(known) if asked == "all" else report.names(asked)
    check_names(kind, found, known)
    return [known[name] for name in found]


def run(plan: CollectivesPlan, unavailable: dict[str, str]) -> Result:
    """Measure the available contenders. Raises RuntimeError if there is none or a rank fails."""
    contenders = [one for one in plan.contenders if one.name not in unavailable]
    if not contenders:
        raise RuntimeError("no contender can run here")
    refused = {
        f"{one.name}, {dtype}": _takes(one)
        for one in contenders
        for dtype in plan.dtypes
        if dtype not in one.dtypes
    }
    found = _measure_collectives(plan, contenders) + _measure_startup(plan, contenders)
    return Result(
        benchmark="collectives",
        machine=describe_machine(),
        plan={
            "ranks": plan.ranks,
            "rounds": plan.rounds,
            "startup_rounds": plan.startup_rounds,
        },
        contenders={one.name: one.about for one in contenders},
        references=[one.name for one in contenders if one.reference],
        unavailable=unavailable | refused,
        measurements=found,
    )


def _measure_collectives(
    plan: CollectivesPlan, contenders: Sequence[Contender]
) -> list[Measurement]:
    cells = [cell for cell in plan.cells() if any(cell.offered_by(one) for one in contenders)]
    of_ranks: list[list[dict[str, Samples]]] = launch(
        plan.ranks, _measure, contenders, cells, plan.rounds
    )
    found = []
    for cell, *samples in zip(cells, *of_ranks, strict=True):
        of = {"collective": cell.collective, "dtype": cell.dtype, "bytes": cell.bytes}
        found += measurements(
            of, {name: slowest([own[name] for own in samples]) for name in samples[0]}
        )
    return found


def _measure(
    contenders: Sequence[Contender], cells: Sequence[Cell], rounds: int
) -> list[dict[str, Samples]]:
    """Return, in each rank, the samples of each cell, in the order of the cells."""
    join()
    for contender in contenders:
        try:
            contender.open()
        except Exception as error:
            raise RuntimeError(f"{contender.name} does not get ready: {error}") from error
    found = [_measure_cell(cell, contenders, rounds) for cell in with_progress(cells)]
    leave()
    return found


def _measure_cell(cell: Cell, contenders: Sequence[Contender], rounds: int) -> dict[str, Samples]:
    ranks = dist.get_world_size()
    plain = Buffers(torch.empty, cell.bytes, cell.dtype, ranks)
    zero_copy = Buffers(memory.empty, cell.bytes, cell.dtype, ranks)
    taking_part = [one for one in contenders if cell.offered_by(one)]
    loops = {}
    for contender in taking_part:
        try:
            loops[contender.name] = contender.prepare(
                cell.collective, zero_copy if contender.zero_copy else plain
            )
        except Exception as error:
            raise RuntimeError(f"{cell} on {contender.name}: {error}") from error
    jobs = [one.name for one in taking_part if not one.reference]
    return take_turns(loops, rounds, jobs if len(loops) > 1 else ())


def _measure_startup(plan: CollectivesPlan, contenders: Sequence[Contender]) -> list[Measurement]:
    starting = [one for one in contenders if isinstance(one, TorchBackend) and one.starts]
    samples: dict[str, list[float]] = {one.name: [] for one in starting}
    for _ in range(plan.startup_rounds):
        for contender in starting:
            samples[contender.name].append(max(launch(plan.ranks, _startup, contender)))
    return [sampled(_STARTUP, name, times) for name, times in samples.items() if times]


def _startup(contender: TorchBackend) -> float:
    """Wait until all ranks have imported torch. Return the microseconds from then to the end of a
    first collective."""
    elapsed = seconds_after_barrier(contender.start)
    leave()
    return elapsed * 1e6


def _takes(contender: Contender) -> str:
    return f"it takes {', '.join(contender.dtypes)}"


def render(result: Result) -> RenderableType:
    """Return a table for each collective and type: times, and their ratios to the first
    contender's."""
    tables: list[RenderableType] = []
    for (collective, dtype), found in groupby(
        result.measurements, key=lambda one: (one.of["collective"], one.of["dtype"])
    ):
        cells = list(found)
        names = {one.contender for one in cells}
        subject = next(name for name in result.contenders if name in names)
        sized = any(one.of["bytes"] for one in cells)

        def entry(row: report.Row, one: Measurement, subject: str = subject) -> Text:
            reference = one.contender in result.references
            return report.compared_with(one, row.get(subject), reference)

        tables.append(
            report.compared(
                f"{collective}, {dtype}" if sized else collective,
                cells,
                {"size": report.size},
                entry,
                list(result.contenders),
            )
        )
    if len(result.contenders) > 1:
        first = next(iter(result.contenders))
        tables.append(
            Text(f"x: of {first}, or of the first in a table without it; red: faster than that")
        )
    return report.group(tables, result)
