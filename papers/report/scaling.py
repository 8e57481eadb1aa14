"""Start-up and collectives over ranks: Panda 2019, and docs/scaling.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from benchmarks.scaling.plot import panels as panels_of_scaling
from benchmarks.scaling.tables import measured
from papers.report.experiment import Experiment, Label, Run
from papers.report.verdicts import (
    PANDA,
    Claim,
    Outcome,
    Unmeasured,
    samples,
    unmeasurable,
)
from torch_hbmcomm.bench.result import Result

_RUN = "scaling"
_START, _ALL_REDUCE = "start", "all_reduce of 8 B"
_LOADED = "hbm, loaded"


def _table(results: Mapping[str, Result]) -> Table:
    _, heading, rows = measured(results[_RUN])
    return Table([*heading[:2], *(f"{ranks} ranks, ms" for ranks in heading[2:])], rows)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return panels_of_scaling(results[_RUN])[0]


def _start_up(results: Mapping[str, Result]) -> Outcome:
    found = {
        (one.of["quantity"], one.contender, one.of["ranks"]): one
        for one in results[_RUN].measurements
    }
    most = max((ranks for _, who, ranks in found if who == "gloo"), default=0)
    names = [(what, who, most) for what in (_START, _ALL_REDUCE) for who in (_LOADED, "gloo")]
    if not set(names) <= set(found):
        raise Unmeasured("The record has no start-up of hbm and Gloo.")
    start, gloo_start, ours, gloo = (found[name].median for name in names)
    return unmeasurable(
        "It needs a cluster, and the keynote has no number for start-up or small collectives. Here"
        f" all ranks share two cores, and {samples(found[name] for name in names)}.",
        f"{most} ranks start in {start:.0f} ms if hbm's module is loaded already (Gloo:"
        f" {gloo_start:.0f} ms), and an {_ALL_REDUCE} takes {ours:.2g} ms (Gloo: {gloo:.2g} ms).",
    )


_CLAIMS = (
    Claim(
        PANDA,
        "Slide on the architecture of MVAPICH2: job start-up, collectives",
        "The runtime of MPI starts jobs and runs collectives scalably.",
        _start_up,
    ),
)


SCALING = Experiment(
    name=_RUN,
    figures="start-up and collectives over processes",
    label=Label.MEASURED,
    differs=(
        "Up to 64 processes on two cores start up and run an all_reduce of 8 B, instead of training"
        ' on clusters. docs/scaling.md extrapolates by a model. In rows with "loaded", hbm\'s'
        ' module was loaded before the measurement. In rows with "nodes", each rank is a node, and'
        ' the ranks use MPI. In "a step in the store", all ranks set a key and read all keys.'
    ),
    claims=_CLAIMS,
    runs=(Run(_RUN, "benchmarks.scaling", [], ["--ranks=2,4,8", "--most-nodes=8", "--rounds=1"]),),
    table=_table,
    panels=_panels,
)
