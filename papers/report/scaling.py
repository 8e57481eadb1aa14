"""Start-up and collectives over ranks: Panda 2019, and docs/scaling.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from benchmarks.scaling.plot import panels as panels_of_scaling
from benchmarks.scaling.tables import measured
from papers.report.experiment import Experiment, Label, Run
from torch_hbmcomm.bench.result import Result

_RUN = "scaling"


def _table(results: Mapping[str, Result]) -> Table:
    _, heading, rows = measured(results[_RUN])
    return Table([*heading[:2], *(f"{ranks} ranks, ms" for ranks in heading[2:])], rows)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return panels_of_scaling(results[_RUN])[0]


SCALING = Experiment(
    name=_RUN,
    paper="Panda 2019, Scalable and Distributed DNN Training on Modern HPC Systems",
    figures="start-up and collectives over processes",
    label=Label.MEASURED,
    differs=(
        "Up to 64 processes on two cores start up and run an all_reduce of 8 B, instead of training"
        ' on clusters. docs/scaling.md extrapolates by a model. In rows with "loaded", hbm\'s'
        ' module was loaded before the measurement. In rows with "nodes", each rank is a node, and'
        ' the ranks use MPI. In "a step in the store", all ranks set a key and read all keys.'
    ),
    found=(
        "The keynote has no figure of start-up or of small collectives. The section images has the"
        " gain of training by reductions in a shared address space.",
    ),
    runs=(Run(_RUN, "benchmarks.scaling", [], ["--ranks=2,4,8", "--most-nodes=8", "--rounds=1"]),),
    table=_table,
    panels=_panels,
)
