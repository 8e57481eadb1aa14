"""Images a second over ranks, on the host and in containers: Panda 2019."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.containers.podman import Division
from papers.images.__main__ import images_a_second
from papers.images.rank import ALONE
from papers.report.experiment import Experiment, Label, Run
from torch_hbmcomm.bench.report import rows
from torch_hbmcomm.bench.result import Result

_RUN = "images"
_RIVALS = ("gloo", ALONE)
_COMPARED = ("hbm", *_RIVALS)


def _table(results: Mapping[str, Result]) -> Table:
    lines = []
    for row in rows(results[_RUN].measurements):
        rates = {name: images_a_second(one) for name, one in row.items()}
        of = row["hbm"].of
        lines.append(
            [of["where"], str(of["ranks"])]
            + [f"{rates[name]:.0f}" if name in rates else "-" for name in _COMPARED]
            + [f"{rates['hbm'] / rates[name]:.2f}" if name in rates else "-" for name in _RIVALS]
        )
    heading = ["where", "ranks", *(f"{name}, images/s" for name in _COMPARED)]
    return Table([*heading, *(f"hbm / {name}" for name in _RIVALS)], lines)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    over_ranks = Panel("on the host", "ranks", "images/s")
    divided = Panel("over containers", y="images/s")
    for row in rows(results[_RUN].measurements):
        of = row["hbm"].of
        for name, one in row.items():
            if of["where"] == str(Division(0)):
                xs, ys, _ = over_ranks.lines.setdefault(name, ([], [], "-"))
                xs.append(of["ranks"])
                ys.append(images_a_second(one))
            else:
                divided.bars.setdefault(name, []).append(images_a_second(one))
        if of["where"] != str(Division(0)):
            divided.labels = [*divided.labels, f"{of['where']}\n{of['ranks']} ranks"]
    return [over_ranks, divided] if divided.bars else [over_ranks]


IMAGES = Experiment(
    name=_RUN,
    paper="Panda 2019, Scalable and Distributed DNN Training on Modern HPC Systems",
    figures="images a second, host and containers",
    label=Label.MEASURED,
    differs=(
        "A net of 1.2 million parameters, with 8 random images per rank and up to 8 ranks on two"
        " cores, replaces AlexNet on clusters. If ranks outnumber the cores, further ranks add"
        " communication but no speed. The keynote compares with MPI, not with Gloo."
    ),
    found=(
        "AlexNet with TensorFlow on CPUs: SALaR and reductions in a shared address space (XPMEM)"
        " give up to 15 % more images a second at 448 processes, and up to 35 % more at 896. The"
        " keynote does not name the baseline. With CNTK there are up to 20 % more images than with"
        " Intel MPI.",
    ),
    runs=(Run(_RUN, "papers.images", [], ["--ranks=2,4", "--rounds=1", "--steps=3"]),),
    table=_table,
    panels=_panels,
)
