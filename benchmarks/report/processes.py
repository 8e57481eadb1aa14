"""Collectives over the number of processes: Woo et al. 2020, Figs. 8 to 10, host.

The paper's integers are float32 here, which is as large. Its 16 MB of a gather are taken as each
process' part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.panels import Panel
from benchmarks.report.experiment import Experiment, Label, Run, Table, milliseconds
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import MIB, format_bytes

_CONTENDERS = ("hbm-zero-copy", "hbm-staged", "hbm-mpi", "mpi-c", "mpich", "mpi-objects")
_WHOLE = {2: 256 * MIB, 4: 256 * MIB, 8: 256 * MIB, 16: 64 * MIB}  # 16 at 256 MiB want 30 GB
_QUICK_WHOLE = {2: 16 * MIB, 4: 16 * MIB}
_PART = 16 * MIB
_QUICK_PART = MIB


def _runs() -> Iterator[Run]:
    for processes, size in _WHOLE.items():
        for name, collectives in (("whole", "broadcast,allreduce"), ("gather", "gather")):
            quick = _QUICK_WHOLE.get(processes, MIB)
            sizes = (size, quick) if name == "whole" else (_PART, _QUICK_PART)
            large, small = (
                [
                    f"--ranks={processes}",
                    f"--collectives={collectives}",
                    f"--sizes={chosen if name == 'whole' else chosen * processes}",
                    f"--contenders={','.join(_CONTENDERS)}",
                    f"--rounds={rounds}",
                    "--startup-rounds=0",
                ]
                for chosen, rounds in zip(sizes, (5, 2), strict=True)
            )
            yield Run(f"{name}-{processes}", "benchmarks.collectives", large, small)


def _measured(results: Mapping[str, Result]) -> Iterator[tuple[str, int, Measurement]]:
    """Yield the collective, the number of processes and the measurement."""
    for result in results.values():
        for one in result.measurements:
            yield one.of["collective"], int(result.plan["ranks"]), one


def _table(results: Mapping[str, Result]) -> Table:
    cells: dict[tuple[str, int, int], dict[str, float]] = {}
    for collective, processes, one in _measured(results):
        row = (collective, processes, int(one.of["bytes"]))
        cells.setdefault(row, {})[one.contender] = milliseconds(one)
    rows = [
        [collective, str(processes), format_bytes(size)]
        + [f"{found[name]:.3g}" if name in found else "-" for name in _CONTENDERS]
        + [_ratio(found, "mpi-c"), _ratio(found, "mpich"), _ratio(found, "mpi-objects")]
        for (collective, processes, size), found in sorted(cells.items())
    ]
    heading = ["collective", "processes", "size", *(f"{name}, ms" for name in _CONTENDERS)]
    return Table([*heading, "mpi-c / hbm", "mpich / hbm", "objects / hbm"], rows)


def _ratio(found: Mapping[str, float], name: str) -> str:
    return f"{found[name] / found['hbm-zero-copy']:.1f}" if name in found else "-"


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panels: dict[str, Panel] = {}
    for collective, processes, one in sorted(_measured(results), key=lambda found: found[1]):
        panel = panels.setdefault(
            collective, Panel(collective, "processes", "ms", logarithmic=True)
        )
        xs, ys, _ = panel.lines.setdefault(one.contender, ([], [], "-"))
        xs.append(processes)
        ys.append(milliseconds(one))
    return list(panels.values())


PROCESSES = Experiment(
    name="processes",
    paper="Woo, Choi, Lee 2020, MPI for Python in MCDRAM",
    figures="Figs. 8, 9 and 10 (host), Table 5 (host)",
    label=Label.MEASURED,
    differs=(
        "Two cores and DDR alone instead of 68 cores of a Xeon Phi with MCDRAM: more processes than"
        " cores from 4 on; 64 MiB instead of 256 with 16 processes. The series C is mpi-c, Python"
        " buffer mpich, Python object mpi-objects."
    ),
    found=(
        "Host, 32 processes, Python buffers in MCDRAM: broadcast of 256 MB 285 ms, gather of 16 MB"
        " 194 ms, allreduce of 256 MB 1,261 ms.",
        "Python buffers are about as fast as C in MCDRAM, in gather up to 65 % faster; in DDR4 they"
        " are slower than C. Python objects are slower than both.",
    ),
    runs=tuple(_runs()),
    table=_table,
    panels=_panels,
)
