"""Collectives over the number of processes: Woo et al. 2020, Figs. 8 to 10, host.

The paper's integers are float32 here, which has the same size. The 16 MB of the paper's gather are
taken as the size of each process' part.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.report.experiment import Experiment, Label, Run, milliseconds
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import KIB, MIB, format_bytes

_SERIES_C = "mpi-c-in-place"
_CONTENDERS = ("hbm-zero-copy", "hbm-staged", "hbm-mpi", _SERIES_C, "mpich", "mpi-objects")
# The size of the tensors by the number of processes. 16 processes would need 30 GB at 256 MiB.
_WHOLE = {2: 256 * MIB, 4: 256 * MIB, 8: 256 * MIB, 16: 64 * MIB}
_QUICK_WHOLE = {2: 16 * MIB, 4: 16 * MIB}
_PART = 16 * MIB
_QUICK_PART = MIB
_SMALL = MIB  # in a gather, the sum of all parts
_SMALL_RUNS = "small"
_PROCESSES = {2: 2, 8: 2, 32: 4, 64: 8}  # in a full report -> in a quick report


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


def _measured(results: Mapping[str, Result]) -> Iterator[tuple[str, int, Measurement]]:
    """Yield the name of the run, the number of processes and the measurement."""
    for name, result in results.items():
        for one in result.measurements:
            yield name, int(result.plan["ranks"]), one


def _cells(results: Mapping[str, Result]) -> dict[tuple[str, int, int], dict[str, float]]:
    """Return the milliseconds of each contender, by collective, processes and bytes."""
    cells: dict[tuple[str, int, int], dict[str, float]] = {}
    for _, processes, one in _measured(results):
        row = (one.of["collective"], processes, int(one.of["bytes"]))
        cells.setdefault(row, {})[one.contender] = milliseconds(one)
    return cells


def _table(results: Mapping[str, Result]) -> Table:
    rows = [
        [collective, str(processes), format_bytes(size)]
        + [f"{found[name]:.3g}" if name in found else "-" for name in _CONTENDERS]
        + [_ratio(found, _SERIES_C), _ratio(found, "mpich"), _ratio(found, "mpi-objects")]
        for (collective, processes, size), found in sorted(_cells(results).items())
    ]
    heading = ["collective", "processes", "size", *(f"{name}, ms" for name in _CONTENDERS)]
    return Table(
        [*heading, *(f"{name} / hbm-zero-copy" for name in (_SERIES_C, "mpich", "mpi-objects"))],
        rows,
    )


def _ratio(found: Mapping[str, float], name: str) -> str:
    return f"{found[name] / found['hbm-zero-copy']:.1f}" if name in found else "-"


def _answer(results: Mapping[str, Result]) -> list[str]:
    """Return the times of buffers, objects and hbm over C's time, for each collective."""
    answers = []
    cells = _cells(results)
    for collective in sorted({collective for collective, _, _ in cells}):
        found = [cell for (own, _, _), cell in cells.items() if own == collective]
        ratios = []
        for name in ("mpich", "mpi-objects", "hbm-zero-copy", "hbm-staged"):
            times = [
                cell[name] / cell[_SERIES_C] for cell in found if {name, _SERIES_C} <= set(cell)
            ]
            if times:
                ratios.append(
                    f"{name} {min(times):.2f} to {max(times):.2f}"
                    f" (median {statistics.median(times):.2f})"
                )
        answers += [f"{collective} takes with {ratio} times C's time." for ratio in ratios]
    return answers


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panels: dict[str, Panel] = {}
    for run, processes, one in sorted(_measured(results), key=lambda found: found[1]):
        title = str(one.of["collective"])
        if run.startswith(_SMALL_RUNS):
            title += f" of {format_bytes(one.of['bytes'])}"
        panel = panels.setdefault(title, Panel(title, "processes", "ms", logarithmic=True))
        xs, ys, _ = panel.lines.setdefault(one.contender, ([], [], "-"))
        xs.append(processes)
        ys.append(milliseconds(one))
    return list(panels.values())


PROCESSES = Experiment(
    name="processes",
    paper="Woo, Choi, Lee 2020, MPI for Python in MCDRAM",
    figures="Figs. 8, 9 and 10, host",
    label=Label.MEASURED,
    differs=(
        "The data are float32 instead of integers. The machine has two cores and DDR alone, instead"
        " of 68 cores of a Xeon Phi with MCDRAM. From 4 processes on there are more processes than"
        " cores. 16 processes have tensors of 64 MiB instead of 256 MiB. 32 and 64 processes have"
        " tensors of only 1 MiB; 2 and 8 processes were measured with 1 MiB too. The paper's series"
        " C is mpi-c-in-place here, its Python buffer is mpich, and its Python object is"
        " mpi-objects. MPI's contenders gather in place. PyTorch's gather also copies the root's"
        " own part, which is half of the data with 2 processes. The paper's 16 MB of a gather are"
        " taken as each process' part; the column size has the sum of all parts. If processes"
        " outnumber the cores, MPI's processes wait in busy loops and hbm's processes sleep. That"
        " explains a part of the difference between them from 4 processes on."
    ),
    found=(
        "Table 5 has 32 processes with Python buffers in MCDRAM: broadcast of 256 MB takes 285 ms,"
        " gather of 16 MB 194 ms, and allreduce of 256 MB 1,261 ms. The section containers repeats"
        " Table 5.",
        "In MCDRAM, Python buffers are about as fast as C, and in gather up to 65 % faster. In"
        " DDR4, broadcast and allreduce of buffers are slower than in C.",
    ),
    runs=(*_runs(), *_small_runs()),
    table=_table,
    panels=_panels,
    answer=_answer,
)
