"""Collectives over containers: Woo et al. 2020, Table 5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.containers.__main__ import DIVISIONS, HOST
from papers.containers.podman import Division
from papers.report.experiment import Experiment, Label, Run, milliseconds
from papers.report.verdicts import (
    EQUAL,
    WOO,
    Claim,
    Outcome,
    Spread,
    Verdict,
    graded,
    samples,
)
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


def _over_host(results: Mapping[str, Result], division: Division) -> Spread:
    """Return the time of a division over the host's, in all collectives."""
    rows = report.rows(results[_RUN].measurements)
    ratios = [row[str(division)].median / row[HOST].median
              for row in rows if {str(division), HOST} <= set(row)]  # fmt: skip
    return Spread.of(ratios, f"{division} and the host")


def _reason(results: Mapping[str, Result], network: str) -> str:
    return (
        f"The collectives are hbm's with 4 ranks, {network}; {samples(results[_RUN].measurements)}."
    )


def _one_container(results: Mapping[str, Result]) -> Outcome:
    ratio = _over_host(results, Division(1))
    return Outcome(
        f"One container takes {ratio.span} times as long as the host.",
        graded(ratio.equal, ratio.median <= EQUAL),
        _reason(results, "over shared memory, instead of Python buffers"),
    )


def _apart(results: Mapping[str, Result]) -> Outcome:
    two, four = (_over_host(results, Division(count, meeting=False)) for count in (2, 4))
    return Outcome(
        f"Two containers that share only a network take {two.span} times as long as the host, four"
        f" {four.span} times.",
        graded(min(two.least, four.least) > EQUAL, max(two.most, four.most) > EQUAL),
        _reason(results, "over MPI through ports, as between the paper's containers"),
    )


def _meeting(results: Mapping[str, Result]) -> Outcome:
    two, four = (_over_host(results, Division(count)) for count in (2, 4))
    slower = [ratio for ratio in (two, four) if ratio.most > EQUAL]
    return Outcome(
        f"Two containers that share a directory take {two.span} times as long as the host, four"
        f" {four.span} times.",
        graded(min(two.least, four.least) > EQUAL, bool(slower)),
        _reason(
            results,
            "over shared memory as on the host, and the paper's containers communicate through"
            " ports",
        ),
    )


def _of_paper(containers: int) -> str:
    """Return the paper's span of times over the host's: Table 5, all collectives."""
    column = (1, 2, 4).index(containers)
    ratios = [others[column] / host for host, *others in PAPER.values()]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


_ON_HOST = ", ".join(f"{name} {host:.3f} s" for name, (host, *_) in PAPER.items())
_SLOWER = "It holds if all collectives are more than 10 % slower, and in part if some are."
_CLAIMS = (
    Claim(
        WOO,
        "Table 5, one container; Figs. 8b, 9b and 10b; section 6, point 2",
        "With 32 processes and buffers in MCDRAM, one container is as fast as the host:"
        f" {_of_paper(1)} times its time ({_ON_HOST}).",
        _one_container,
        "It holds if all collectives are within 10 % of the host, and in part if the median is at"
        " most 10 % slower.",
    ),
    Claim(
        WOO,
        "Table 5, two and four containers; Figs. 8c, 8d, 9c, 9d, 10c and 10d; section 6, point 2",
        f"Two containers take {_of_paper(2)} times as long as the host, four {_of_paper(4)} times"
        " (32 processes, buffers in MCDRAM).",
        _apart,
        _SLOWER,
    ),
    Claim(
        WOO,
        "Section 6, point 2, with shared memory instead of ports",
        "Several containers communicate less efficiently than processes on the host.",
        _meeting,
        _SLOWER,
    ),
    Claim(
        WOO,
        "Figs. 8c and 8d; section 6, point 2",
        "In two and four containers C stays fast, and a broadcast of buffers in MCDRAM falls behind"
        " C.",
        Outcome(
            "",
            Verdict.NOT_MEASURED,
            "`python -m papers.containers` has no contender in C and no Python buffers. It could"
            " have both in DDR; no machine with MCDRAM is available.",
        ),
    ),
)


CONTAINERS = Experiment(
    name="containers",
    figures="Table 5",
    label=Label.MEASURED,
    differs=(
        "4 ranks run hbm's collectives on two cores, in containers of podman, in DDR. The paper has"
        " Python buffers of MPI in MCDRAM, with 32 ranks on 68 cores, in containers of Docker. The"
        " data are float32 instead of integers. The 16 MB of a gather are each process' part. In"
        ' the columns "apart" the containers share only podman\'s bridge, and communicate through'
        " ports. These columns are closest to the paper's containers, which communicate through"
        " ports too. In the other columns the containers have no network, and share a directory for"
        " sockets, through which hbm shares memory."
    ),
    claims=_CLAIMS,
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
