"""The Soft Memory Box: Ahn et al. 2018, Fig. 5 and Figs. 6 to 9."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.async_sgd.plot import panels as panels_of_sgd
from benchmarks.box.plot import panels as panels_of_box
from benchmarks.box.sections import SECTIONS
from benchmarks.panels import Panel
from benchmarks.report.experiment import Experiment, Label, Run, Table
from torch_hbmcomm.bench.report import rate
from torch_hbmcomm.bench.result import Measurement, Result

_PAPER = "Ahn, Kim, Lim, Kang 2018, Soft Memory Box"
_CLIENTS = "box-clients"
_SGD = "async-sgd"
_TWICE = 2.1  # the paper's mean of MPI's time over the box's, sequential
_OURS = "hbm shm"
_THEIRS = "MPI"
_SLEEPING = "MPI sleeping"
_COMPARED = (_OURS, _THEIRS, _SLEEPING)


def _clients(results: Mapping[str, Result]) -> Table:
    rows = [
        [
            one.contender,
            str(one.of["clients"]),
            f"{rate(SECTIONS[one.of['section']], one):.2f}",
            f"{one.values['smallest_share']:.2f}" if "smallest_share" in one.values else "-",
        ]
        for one in results[_CLIENTS].measurements
    ]
    heading = ["transport", "clients", "GB/s", "the slowest client's part of an equal share"]
    return Table(heading, rows)


def _ratios(measured: Sequence[Measurement], theirs: str) -> dict[str, list[float]]:
    """Return their time over the box's, for every model and number of workers, by scenario."""
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
            f"{sum(one >= _TWICE for one in found)} of {len(found)}",
        ]
        for theirs in (_THEIRS, _SLEEPING)
        for scenario, found in _ratios(results[_SGD].measurements, theirs).items()
    ]
    heading = ["scenario", "cells", "median of MPI / box", "mean", f"at least {_TWICE}"]
    return Table(heading, rows)


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
        "Clients on the box's own machine, through shared memory, 1 MiB at a time for some seconds;"
        " the paper's move 1 GB each over InfiniBand FDR."
    ),
    found=(
        "2 to 32 clients, of the 7 GB/s of the link: half reads and half writes up to 6.7 GB/s"
        " (96 %), reads alone up to 5.5 (8 clients), writes alone up to 5.2 (32 clients).",
    ),
    runs=(
        Run(
            _CLIENTS,
            "benchmarks.box",
            ["--sections=clients"],
            ["--sections=clients", "--clients=2,4", "--quick"],
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
        "All on one machine of two cores, with 2, 4 and 8 workers where the paper has 2 to 32 on"
        " several machines, and with computation as a sleep. MPI's ranks wait in a busy"
        " loop there, which takes the processor from others; those of MPI sleeping ask for a turn"
        " and sleep until it comes, which is fairer where they are more than the cores."
    ),
    found=(
        "Sequential: communication by MPI takes 2.1 times as long on average.",
        "Parallel: an iteration takes up to 3.5 times as long; communication that computation does"
        " not hide takes 7 times as long in Inception_v1, 5.2 in Resnet_50, 4.8 in"
        " Inception_resnet_v2, and 2.0 in Resnet_152 and VGG16.",
    ),
    runs=(
        Run(
            _SGD,
            "benchmarks.async_sgd",
            ["--sections=node", f"--contenders={','.join(_COMPARED)}", "--rounds=2"],
            ["--sections=node", f"--contenders={','.join(_COMPARED)}", "--workers=2", "--quick"],
        ),
    ),
    table=_sgd,
    panels=_sgd_panels,
)
