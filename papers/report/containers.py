"""Collectives over containers: Woo et al. 2020, Table 5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.containers.__main__ import DIVISIONS, HOST
from papers.report.experiment import Experiment, Label, Run, milliseconds
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import format_bytes

_RUN = "containers"
_OTHERS = [str(division) for division in DIVISIONS if str(division) != HOST]
# The paper's seconds: on the host, in one, two and four containers.
PAPER = {
    "broadcast": (0.285, 0.288, 1.991, 2.231),
    "gather": (0.194, 0.199, 0.508, 0.628),
    "allreduce": (1.261, 1.271, 4.447, 4.677),
}


def _ratios(row: report.Row) -> Iterator[float]:
    """Yield the median of each division over the host's."""
    yield from (row[name].median / row[HOST].median for name in _OTHERS)


def _table(results: Mapping[str, Result]) -> Table:
    heading = ["collective", "size", f"{HOST}, ms", *(f"{name} / {HOST}" for name in _OTHERS)]
    heading.append("paper: 1, 2, 4 containers / host")
    rows = []
    for row in report.rows(results[_RUN].measurements):
        host: Measurement = row[HOST]
        alone, *paper = PAPER[host.of["collective"]]
        rows.append(
            [host.of["collective"], format_bytes(host.of["bytes"]), f"{milliseconds(host):.2f}"]
            + [f"{ratio:.2f}" for ratio in _ratios(row)]
            + [", ".join(f"{one / alone:.2f}" for one in paper)]
        )
    return Table(heading, rows)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panel = Panel("", y=f"times the {HOST}'s median", logarithmic=True)
    for row in report.rows(results[_RUN].measurements):
        panel.labels = [*panel.labels, row[HOST].of["collective"]]
        for name, ratio in zip(_OTHERS, _ratios(row), strict=True):
            panel.bars.setdefault(name, []).append(ratio)
    return [panel]


CONTAINERS = Experiment(
    name="containers",
    paper="Woo, Choi, Lee 2020, MPI for Python in MCDRAM",
    figures="Table 5",
    label=Label.MEASURED,
    differs=(
        "4 ranks run on two cores, in containers of podman, in DDR. The paper has 32 ranks on 68"
        " cores, in containers of Docker. The data are float32 instead of integers. The 16 MB of a"
        " gather are each process' part. In the rows \"apart\" the containers share only podman's"
        " bridge, and communicate through ports. These rows are closest to the paper's containers."
        " In the other rows the containers have no network, and share a directory for sockets. Only"
        " hbm supports that."
    ),
    found=(
        "One container is as fast as the host. With two containers a collective takes 2.6"
        " to 7.0 times as long as on the host, with four 3.2 to 7.8 times. The paper measured"
        " Python buffers of 256 MB (gather 16 MB) in MCDRAM, with 32 processes.",
    ),
    runs=(
        Run(
            _RUN,
            "papers.containers",
            ["--size=256MiB", "--part=16MiB", "--rounds=9", "--calls=5"],
            ["--size=1MiB", "--part=1MiB", "--rounds=1", "--calls=3"],
        ),
    ),
    table=_table,
    panels=_panels,
)
