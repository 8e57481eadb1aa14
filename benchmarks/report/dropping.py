"""Layer dropping with a parameter server: Lee et al. 2020, Table 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.layer_drop.plot import panels as panels_of_dropping
from benchmarks.panels import Panel
from benchmarks.report.experiment import Experiment, Label, Run, Table
from torch_hbmcomm.bench.result import Result

_RUN = "layer-drop"


def _table(results: Mapping[str, Result]) -> Table:
    rows = [
        [
            str(one.of["case"]),
            one.contender,
            _share(one.values.get("time_share")),
            _share(one.values.get("bytes_share")),
        ]
        for one in results[_RUN].measurements
    ]
    return Table(["network", "who", "time of communication", "bytes"], rows)


def _share(value: float | None) -> str:
    """Return the change. There is none where computation, which is taken off an iteration, took
    longer than all of it: in short runs on a busy machine."""
    return "-" if value is None or value < 0 else f"{value - 1:+.1%}"


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return panels_of_dropping(results[_RUN])[0]


TABLE_1 = Experiment(
    name=_RUN,
    paper="Lee, Choi, Jeong, Noh, Shin 2020, Communication Optimization Schemes",
    figures="Table 1",
    label=Label.EMULATED,
    differs=(
        "Hosts are network namespaces with a cable between them; gradients have ResNet-50's sizes"
        " and next to no computation; accuracy is not measured here."
    ),
    found=("Communication -95 % at 1 Gbit/s and -81 % at 56 Gbit/s.",),
    runs=(
        Run(_RUN, "benchmarks.layer_drop", ["--sections=server"], ["--sections=server", "--quick"]),
    ),
    table=_table,
    panels=_panels,
)
