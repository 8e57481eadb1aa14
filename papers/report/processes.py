"""Collectives over the number of processes: Woo et al. 2020, Figs. 8 to 10, host.

The types are int32, the paper's, and float32. The 16 MB of the paper's gather are taken as the size
of each process' part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.report.experiment import Experiment, Label, Run, milliseconds
from papers.report.verdicts import (
    EQUAL,
    WOO,
    Claim,
    Outcome,
    Spread,
    compared,
    graded,
    samples,
    unmeasurable,
)
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import KIB, MIB, format_bytes

INT32 = "int32"  # the paper's type
SERIES_C = "mpi-c-in-place"
BUFFERS = "mpich"
OBJECTS = "mpi-objects"
_IN_PLACE = "hbm-zero-copy"
OVER_MPI = "hbm-mpi"
_CONTENDERS = (_IN_PLACE, "hbm-staged", OVER_MPI, SERIES_C, BUFFERS, OBJECTS)
_COLLECTIVES = ("broadcast", "gather", "allreduce")
_BUFFER_RULE = "It holds if buffers take more than 1.1 times C's time in the median."
# The size of the tensors by the number of processes, with the tensors of all contenders in memory.
# 16 processes would need 30 GB at 256 MiB.
_WHOLE = {2: 256 * MIB, 4: 256 * MIB, 8: 256 * MIB, 16: 64 * MIB}
_QUICK_WHOLE = {2: 16 * MIB, 4: 16 * MIB}
_PART = 16 * MIB
_QUICK_PART = MIB
_SMALL = MIB  # in a gather, the sum of all parts
_SMALL_RUNS = "small"
_PROCESSES = {2: 2, 8: 2, 32: 4, 64: 8}  # in a full report -> in a quick report
_ALONE = 32  # processes that have the tensors of one contender at a time


def _small_runs() -> Iterator[Run]:
    """Yield the runs with one small size, over up to 64 processes."""
    for processes, few in _PROCESSES.items():
        large, small = (
            _arguments(count, "broadcast,allreduce,gather", size, rounds)
            for count, size, rounds in ((processes, _SMALL, 3), (few, KIB, 1))
        )
        yield Run(f"{_SMALL_RUNS}-{processes}", "benchmarks.collectives", large, small)


def _arguments(processes: int, collectives: str, size: int, rounds: int) -> list[str]:
    return [
        f"--ranks={processes}",
        f"--collectives={collectives}",
        f"--sizes={size}",
        f"--contenders={','.join(_CONTENDERS)}",
        f"--rounds={rounds}",
        "--startup-rounds=0",
    ]


def _runs() -> Iterator[Run]:
    for processes, size in _WHOLE.items():
        for name, collectives in (("whole", "broadcast,allreduce"), ("gather", "gather")):
            quick = _QUICK_WHOLE.get(processes, MIB)
            sizes = (size, quick) if name == "whole" else (_PART, _QUICK_PART)
            times = 1 if name == "whole" else processes
            large, small = (
                _arguments(processes, collectives, times * chosen, rounds)
                for chosen, rounds in zip(sizes, (5, 2), strict=True)
            )
            yield Run(f"{name}-{processes}", "benchmarks.collectives", large, small)


def _alone() -> Run:
    large, small = (
        [f"--ranks={ranks}", f"--size={size}", f"--part={part}", f"--rounds={rounds}"]
        for ranks, size, part, rounds in ((_ALONE, "256MiB", "16MiB", 3), (2, "1MiB", "256KiB", 1))
    )
    return Run(f"alone-{_ALONE}", "papers.processes", large, small)


def _in_int32(run: Run) -> Run:
    dtype = f"--dtype={INT32}"
    return Run(f"{run.name}-{INT32}", run.module, [*run.arguments, dtype], [*run.quick, dtype])


def _measured(results: Mapping[str, Result]) -> Iterator[tuple[str, int, Measurement]]:
    """Yield the name of the run, the number of processes and the measurement."""
    for name, result in results.items():
        for one in result.measurements:
            yield name, int(result.plan["ranks"]), one


Cell = tuple[str, int, int, str]
"""A collective, the number of processes, the bytes and the type."""


def _cells(results: Mapping[str, Result]) -> dict[Cell, dict[str, float]]:
    """Return the milliseconds of each contender, by cell."""
    cells: dict[Cell, dict[str, float]] = {}
    for _, processes, one in _measured(results):
        row = (one.of["collective"], processes, int(one.of["bytes"]), one.of["dtype"])
        cells.setdefault(row, {})[one.contender] = milliseconds(one)
    return cells


def _table(results: Mapping[str, Result]) -> Table:
    rows = [
        [collective, str(processes), format_bytes(size), dtype]
        + [f"{found[name]:.3g}" if name in found else "-" for name in _CONTENDERS]
        + [_ratio(found, name) for name in (SERIES_C, BUFFERS, OBJECTS)]
        for (collective, processes, size, dtype), found in sorted(_cells(results).items())
    ]
    heading = ["collective", "processes", "size", "type", *(f"{name}, ms" for name in _CONTENDERS)]
    return Table(
        [*heading, *(f"{name} / {_IN_PLACE}" for name in (SERIES_C, BUFFERS, OBJECTS))],
        rows,
    )


def _ratio(found: Mapping[str, float], name: str) -> str:
    both = {name, _IN_PLACE} <= set(found)
    return f"{found[name] / found[_IN_PLACE]:.1f}" if both else "-"


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panels: dict[str, Panel] = {}
    for run, processes, one in sorted(_measured(results), key=lambda found: found[1]):
        title = str(one.of["collective"])
        if run.startswith(_SMALL_RUNS):
            title += f" of {format_bytes(one.of['bytes'])}"
        title += f", {one.of['dtype']}"
        panel = panels.setdefault(title, Panel(title, "processes", "ms", logarithmic=True))
        xs, ys, _ = panel.lines.setdefault(one.contender, ([], [], "-"))
        xs.append(processes)
        ys.append(milliseconds(one))
    return list(panels.values())


def _over_c(results: Mapping[str, Result], who: str, *collectives: str) -> Spread:
    """Return the time of a contender over C's time, in the cells of these collectives."""
    ratios = [
        cell[who] / cell[SERIES_C]
        for (collective, _, _, _), cell in _cells(results).items()
        if collective in collectives and {who, SERIES_C} <= set(cell)
    ]
    return Spread.of(ratios, f"{who} and C in {', '.join(collectives)}")


def _samples(results: Mapping[str, Result]) -> str:
    return samples(one for _, _, one in _measured(results))


def _buffers(collective: str) -> Callable[[Mapping[str, Result]], Outcome]:
    """Return the function that compares buffers with C, as the paper does in DDR4."""

    def outcome(results: Mapping[str, Result]) -> Outcome:
        ratio = _over_c(results, BUFFERS, collective)
        return Outcome(
            f"In DDR, {collective} of buffers is {compared(ratio.median)} C:"
            f" {ratio.times('the time of C')}.",
            graded(ratio.median > EQUAL, part=False),
            "Python and C pass the addresses of buffers to the same MPI library, without a"
            f" conversion; {_samples(results)}.",
        )

    return outcome


def _gather(results: Mapping[str, Result]) -> Outcome:
    ratio = _over_c(results, BUFFERS, "gather")
    return unmeasurable(
        f"The paper's gain is in MCDRAM, which is missing here; {_samples(results)}.",
        f"In DDR, gather of buffers is {compared(ratio.median)} C: {ratio.times('the time of C')}.",
    )


def _objects(results: Mapping[str, Result]) -> Outcome:
    ratios = {
        row: cell[OBJECTS] / cell[BUFFERS]
        for row, cell in _cells(results).items()
        if {OBJECTS, BUFFERS} <= set(cell)
    }
    ratio = Spread.of(ratios.values(), "objects and buffers")
    faster = [
        f"{collective} of {format_bytes(size)} of {dtype} with {processes} processes"
        for (collective, processes, size, dtype), one in ratios.items()
        if one < 1
    ]
    listed = f" ({'; '.join(faster)})" if faster else ""
    return Outcome(
        f"Objects take {ratio.times('the time of buffers')}.",
        graded(not faster, ratio.median > EQUAL),
        "Objects are converted to bytes and back. They are faster in"
        f" {len(faster)} of {ratio.cells} cells{listed}.",
    )


def _staged(results: Mapping[str, Result]) -> Outcome:
    theirs, ours = (_over_c(results, who, *_COLLECTIVES) for who in (OVER_MPI, _IN_PLACE))
    each = ", ".join(f"{name} {_over_c(results, OVER_MPI, name).median:.2f}"
                     for name in _COLLECTIVES)  # fmt: skip
    return Outcome(
        f"{OVER_MPI} stages PyTorch's tensors in MPI's buffers, and takes"
        f" {theirs.times('the time of C')}. By collective, the medians are {each}. In place, hbm"
        f" ({_IN_PLACE}) takes {ours.times('the time of C')}.",
        graded(theirs.median <= EQUAL, ours.median <= EQUAL),
        "Staging copies each tensor into a buffer and out of it; from 4 processes on, MPI's busy"
        " loops on two cores favour hbm in place.",
    )


_FLOAT32_RUNS = (*_runs(), *_small_runs())
_NEEDED = [run.name for run in _FLOAT32_RUNS]
_CLAIMS = (
    Claim(
        WOO,
        "Fig. 8, host, DDR4",
        "In DDR4, a broadcast of Python buffers takes longer than in C.",
        _buffers("broadcast"),
        _BUFFER_RULE,
        _NEEDED,
    ),
    Claim(
        WOO,
        "Fig. 9, MCDRAM",
        "In MCDRAM, a gather of Python buffers is up to 65 % faster than in C.",
        _gather,
        runs=_NEEDED,
    ),
    Claim(
        WOO,
        "Fig. 10, host, DDR4",
        "In DDR4, an allreduce of Python buffers takes longer than in C.",
        _buffers("allreduce"),
        _BUFFER_RULE,
        _NEEDED,
    ),
    Claim(
        WOO,
        "Figs. 8 to 10; section 6, point 1",
        "Communication of Python buffers is more efficient than communication of Python objects.",
        _objects,
        "It holds if buffers are faster in all cells, and in part if they are 10 % faster in the"
        " median.",
        _NEEDED,
    ),
    Claim(
        WOO,
        "Section 7, future work",
        "The authors' MPI library can serve PyTorch and TensorFlow (their plan, without numbers).",
        _staged,
        "It holds if hbm-mpi takes at most 1.1 times C's time in the median, and in part if only"
        " hbm in place does.",
        _NEEDED,
    ),
)


PROCESSES = Experiment(
    name="processes",
    figures="Figs. 8, 9 and 10, host",
    label=Label.MEASURED,
    differs=(
        "The types are int32, the paper's, and float32. The machine has two cores and DDR alone,"
        " instead of 68 cores of a Xeon Phi with MCDRAM. From 4 processes on there are more"
        " processes than cores. 16 processes have tensors of 64 MiB instead of 256 MiB. 32"
        " processes have 256 MiB with one contender in memory at a time; there the objects have the"
        " largest size that fits. 2, 8, 32 and 64 processes also have tensors of 1 MiB. The paper's"
        " series C is mpi-c-in-place here, its Python buffer is mpich, and its Python object is"
        " mpi-objects. MPI's contenders gather in place. PyTorch's gather also copies the root's"
        " own part, which is half of the data with 2 processes. The paper's 16 MB of a gather are"
        " taken as each process' part; the column size has the sum of all parts. If processes"
        " outnumber the cores, MPI's processes wait in busy loops and hbm's processes sleep. That"
        " explains a part of the difference between them from 4 processes on."
    ),
    claims=_CLAIMS,
    runs=(*_FLOAT32_RUNS, _alone(), *map(_in_int32, (*_FLOAT32_RUNS, _alone()))),
    table=_table,
    panels=_panels,
)
