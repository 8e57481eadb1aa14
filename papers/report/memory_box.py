"""The Soft Memory Box: Ahn et al. 2018, Fig. 5 and Figs. 6 to 9."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.box.plot import panels as panels_of_box
from benchmarks.box.sections import SECTIONS
from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.async_sgd.plot import panels as panels_of_sgd
from papers.report.experiment import Experiment, Label, Run
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import Measurement, Result

_PAPER = "Ahn, Kim, Lim, Kang 2018, Soft Memory Box"
_CLIENTS = "box-clients"
_SGD = "async-sgd"
_TWICE = 2.1  # the paper's mean of MPI's time over the box's, sequential
_OURS = "hbm shm"
_THEIRS = "MPI"
_SLEEPING = "MPI sleeping"
_HIDDEN = 1.0  # milliseconds that any wait of an iteration takes, even for hidden communication
_COMPARED = (_OURS, _THEIRS, _SLEEPING)
# (section, contender) -> the transport's name, and the contender of its bound in the same run.
_WAYS = {
    ("clients", _OURS): ("shm", "memcpy"),
    ("clients", "hbm tcp"): ("tcp, loopback", None),
    ("clients-link", "hbm tcp"): ("tcp, 1 Gbit/s", "link"),
}


def _clients(results: Mapping[str, Result]) -> Table:
    lines: dict[tuple[str, int], dict[str, tuple[str, float]]] = {}
    for row in report.rows(results[_CLIENTS].measurements):
        for one in row.values():
            section, operation = one.of["section"], one.of["operation"]
            if (section, one.contender) in _WAYS:
                way, bound = _WAYS[section, one.contender]
                speed = f"{report.rate(SECTIONS[section], one):.3g}"
                if bound is not None:
                    speed += f" ({row[bound].median / one.median:.0%} of {bound})"
                found = lines.setdefault((way, one.of["clients"]), {})
                found[operation] = speed, one.values["smallest_share"]
    operations = next(iter(lines.values()))
    ordered = sorted(lines.items(), key=lambda line: line[0][0])
    rows = [
        [way, str(clients)]
        + [found[operation][0] for operation in operations]
        + [f"{min(share for _, share in found.values()):.2f}"]
        for (way, clients), found in ordered
    ]
    heading = ["over", "clients", *(f"{operation}, GB/s" for operation in operations)]
    return Table([*heading, "the slowest client's part of an equal share"], rows)


def _ratios(measured: Sequence[Measurement], theirs: str) -> dict[str, list[float]]:
    """Return, by scenario, the time of `theirs` over the box's for each model and number of
    workers."""
    cells: dict[tuple[str, str, int], dict[str, float]] = {}
    for one in measured:
        if one.of.get("section") == "node" and one.samples:
            row = (one.of["scenario"], one.of["model"], one.of["workers"])
            cells.setdefault(row, {})[one.contender] = one.median
    ratios: dict[str, list[float]] = {}
    for (scenario, _, _), found in cells.items():
        if found.get(_OURS) and theirs in found:
            ratios.setdefault(scenario, []).append(found[theirs] / found[_OURS])
    return ratios


def _sgd(results: Mapping[str, Result]) -> Table:
    rows = [
        [
            scenario if theirs == _THEIRS else f"{scenario}, {theirs}",
            str(len(found)),
            f"{statistics.median(found):.2f}",
            f"{statistics.fmean(found):.2f}",
            f"{min(found):.2f} to {max(found):.2f}",
            f"{sum(one >= _TWICE for one in found)} of {len(found)}",
        ]
        for theirs in (_THEIRS, _SLEEPING)
        for scenario, found in _ratios(results[_SGD].measurements, theirs).items()
    ]
    heading = [
        "scenario",
        "cells",
        "median of MPI / box",
        "mean",
        "from, to",
        f"cells with at least {_TWICE} (the paper's sequential mean)",
    ]
    return Table(heading, rows)


def _sgd_answer(results: Mapping[str, Result]) -> list[str]:
    """Return the exposed communication in the parallel scenario, and the numbers of samples."""
    shown: dict[tuple[str, int], dict[str, float]] = {}
    measured = [one for one in results[_SGD].measurements if "scenario" in one.of and one.samples]
    for one in measured:
        if one.of["scenario"] == "parallel":
            cell = one.of["model"], one.of["workers"]
            shown.setdefault(cell, {})[one.contender] = one.median - one.of["compute_ms"]
    names = list(dict.fromkeys(name for found in shown.values() for name in found))
    over = [
        f"{sum(found.get(name, 0.0) > _HIDDEN for found in shown.values())} with {name}"
        for name in names
    ]
    single = [
        f"{sum(one.summary.n == 1 for one in measured if one.contender == name)} with {name}"
        for name in names
    ]
    count = len({(one.of["scenario"], one.of["model"], one.of["workers"]) for one in measured})
    return [
        f"Parallel, cells of {len(shown)} with more than {_HIDDEN:g} ms of exposed communication:"
        f" {', '.join(over)}.",
        *(
            f"{model} with {workers} workers: exposed communication"
            f" {', '.join(f'{found[name]:.1f}' for name in found)} ms ({', '.join(found)})."
            for (model, workers), found in shown.items()
            if max(found.values()) > _HIDDEN
        ),
        f"All scenarios, cells of {count} with a single sample: {', '.join(single)}.",
    ]


def _box_panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return panels_of_box(results[_CLIENTS])[0]


def _sgd_panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return panels_of_sgd(results[_SGD])[0]


CLIENTS = Experiment(
    name=_CLIENTS,
    paper=_PAPER,
    figures="Fig. 5",
    label=Label.MEASURED,
    differs=(
        "Clients run on the box's machine, over shared memory or tcp, and over an emulated link of"
        " 1 Gbit/s between two network namespaces. They transfer 1 MiB at a time for some seconds."
        " Each client of the paper transfers 1 GB, over InfiniBand FDR. A mix of half reads and"
        " half writes may use both directions of the link, so its share refers to twice the link's"
        " rate. The paper's 96 % refers to one direction. The bound memcpy is a copy between the"
        " same memory in the same processes."
    ),
    found=(
        "The link has 7 GB/s. 2 to 32 clients reach up to 6.7 GB/s (96 %) with half reads and half"
        " writes. Reads alone reach up to 5.5 GB/s (8 clients), writes alone up to 5.2 GB/s (32"
        " clients).",
    ),
    runs=(
        Run(
            _CLIENTS,
            "benchmarks.box",
            ["--sections=clients,clients-link"],
            ["--sections=clients,clients-link", "--clients=2,4", "--quick"],
        ),
    ),
    table=_clients,
    panels=_box_panels,
)

ASYNC_SGD = Experiment(
    name=_SGD,
    paper=_PAPER,
    figures="Figs. 6 to 9, Table 2",
    label=Label.EMULATED,
    differs=(
        "All processes are on one machine of two cores. The box and MPI use its memory instead of"
        " InfiniBand. There are 2, 4 and 8 workers; the paper has 2 to 32. As in the paper,"
        " computation is a sleep. A cell is a scenario with one model and one number of workers."
        " Cells of the scenario sequential compare the time of communication, and cells of the"
        " scenario parallel the time of an iteration. MPI's server adds on one thread. MPI's ranks"
        " wait in a busy loop, which takes processor time from other ranks. With the contender MPI"
        " sleeping, a rank asks the server for a turn, and sleeps until the turn comes. This is"
        " fairer if ranks outnumber the cores."
    ),
    found=(
        "Sequential: communication by MPI takes 1.1 to 4.2 times as long as with the box, 2.1 times"
        " on average.",
        "Parallel: an iteration with MPI takes up to 3.5 times as long as with the box. With 32"
        " workers, the exposed communication takes 7 times as long with Inception_v1, 5.2 times"
        " with Resnet_50, 4.8 times with Inception_resnet_v2, and 2.0 times with Resnet_152 and"
        " VGG16.",
    ),
    runs=(
        Run(
            _SGD,
            "papers.async_sgd",
            ["--sections=node", f"--contenders={','.join(_COMPARED)}", "--rounds=3"],
            ["--sections=node", f"--contenders={','.join(_COMPARED)}", "--workers=2", "--quick"],
        ),
    ),
    table=_sgd,
    panels=_sgd_panels,
    answer=_sgd_answer,
)
