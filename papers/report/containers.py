"""Collectives over containers: Woo et al. 2020, Table 5, and Figs. 8 to 10, b to d."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.containers.__main__ import DIVISIONS, HOST
from papers.containers.podman import Division
from papers.containers.rank import COLLECTIVES, HBM
from papers.report.experiment import Experiment, Label, Run, milliseconds
from papers.report.processes import BUFFERS, INT32, OBJECTS, OVER_MPI, SERIES_C
from papers.report.verdicts import (
    EQUAL,
    WOO,
    Claim,
    Outcome,
    Spread,
    graded,
    samples,
)
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import format_bytes

_HBM_RUN = "containers"
_MPI_RUN = "containers-mpi"
_MPI = (SERIES_C, BUFFERS, OBJECTS)
_SERIES = (HBM, OVER_MPI, *_MPI)
_OTHERS = [str(division) for division in DIVISIONS if str(division) != HOST]
_APART = (Division(2, meeting=False), Division(4, meeting=False))
# The paper's seconds for buffers: on the host, in one, two and four containers.
PAPER = {
    "broadcast": (0.285, 0.288, 1.991, 2.231),
    "gather": (0.194, 0.199, 0.508, 0.628),
    "allreduce": (1.261, 1.271, 4.447, 4.677),
}


def _series(one: Measurement) -> str:
    """Return the series. A record without series has hbm's collectives."""
    return str(one.of.get("series", HBM))


def _type(one: Measurement) -> str:
    """Return the type. A record without types has float32."""
    return str(one.of.get("dtype", "float32"))


def _rows(results: Mapping[str, Result]) -> list[report.Row]:
    """Return the measurements of each collective, type and series, in this order."""

    def place(row: report.Row) -> tuple[int, str, int]:
        one = next(iter(row.values()))
        return COLLECTIVES.index(one.of["collective"]), _type(one), _SERIES.index(_series(one))

    return sorted(
        (row for one in results.values() for row in report.rows(one.measurements)), key=place
    )


def _ratios(row: report.Row) -> dict[str, float]:
    """Return the median of each measured division over the host's."""
    return {name: row[name].median / row[HOST].median for name in _OTHERS if name in row}


def _table(results: Mapping[str, Result]) -> Table:
    heading = ["collective", "type", "size", "series", f"{HOST}, ms"]
    heading += [f"{name} / {HOST}" for name in _OTHERS]
    heading.append("the paper's buffers: 1, 2, 4 containers / host")
    rows = []
    for row in _rows(results):
        host, ratios = row[HOST], _ratios(row)
        alone, *paper = PAPER[host.of["collective"]]
        rows.append(
            [host.of["collective"], _type(host), format_bytes(host.of["bytes"]), _series(host)]
            + [f"{milliseconds(host):.2f}"]
            + [f"{ratios[name]:.2f}" if name in ratios else "-" for name in _OTHERS]
            + [", ".join(f"{one / alone:.2f}" for one in paper)]
        )
    return Table(heading, rows)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panels: dict[str, Panel] = {}
    for row in _rows(results):
        title = f"{_series(row[HOST])}, {_type(row[HOST])}"
        panel = panels.setdefault(
            title, Panel(title, y=f"times the {HOST}'s median", logarithmic_y=True)
        )
        panel.labels = [*panel.labels, row[HOST].of["collective"]]
        for name, ratio in _ratios(row).items():
            panel.bars.setdefault(name, []).append(ratio)
    return list(panels.values())


def _measurements(results: Mapping[str, Result], *series: str) -> Iterator[Measurement]:
    for result in results.values():
        yield from (one for one in result.measurements if _series(one) in series)


def _over_host(results: Mapping[str, Result], division: Division, *series: str) -> Spread:
    """Return the time of a division over the host's, in all collectives and types of the series."""
    ratios = [
        row[str(division)].median / row[HOST].median
        for row in _rows(results)
        if {str(division), HOST} <= set(row) and _series(row[HOST]) in series
    ]
    return Spread.of(ratios, f"{division} and the host with {', '.join(series)}")


def _over_c(results: Mapping[str, Result], *divisions: Division) -> Spread:
    """Return the time of buffers over C's time, in broadcasts of these divisions."""
    medians = {
        (_series(one), _type(one), one.contender): one.median
        for one in _measurements(results, SERIES_C, BUFFERS)
        if one.of["collective"] == "broadcast" and one.contender in map(str, divisions)
    }
    ratios = [
        median / medians[SERIES_C, dtype, division]
        for (series, dtype, division), median in medians.items()
        if series == BUFFERS and (SERIES_C, dtype, division) in medians
    ]
    names = ", ".join(map(str, divisions))
    return Spread.of(ratios, f"broadcasts of {BUFFERS} and {SERIES_C}: {names}")


def _reason(results: Mapping[str, Result], network: str) -> str:
    measured = samples(_measurements(results, HBM))
    return f"The collectives are hbm's with 4 ranks, {network}; {measured}."


def _one_container(results: Mapping[str, Result]) -> Outcome:
    ratio = _over_host(results, Division(1), HBM)
    return Outcome(
        f"One container takes {ratio.span} times as long as the host.",
        graded(ratio.equal, ratio.median <= EQUAL),
        _reason(results, "over shared memory, instead of Python buffers"),
    )


def _apart(results: Mapping[str, Result]) -> Outcome:
    two, four = (_over_host(results, division, HBM) for division in _APART)
    return Outcome(
        f"Two containers that share only a network take {two.span} times as long as the host, four"
        f" {four.span} times.",
        graded(min(two.least, four.least) > EQUAL, max(two.most, four.most) > EQUAL),
        _reason(results, "over MPI through ports, as between the paper's containers"),
    )


def _meeting(results: Mapping[str, Result]) -> Outcome:
    two, four = (_over_host(results, Division(count), HBM) for count in (2, 4))
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


def _mpi_reason(results: Mapping[str, Result]) -> str:
    return (
        "4 ranks call MPI in DDR, not in MCDRAM. C is"
        f" {SERIES_C}, buffers are {BUFFERS}, and objects are {OBJECTS};"
        f" {samples(_measurements(results, *_MPI))}."
    )


def _mpi_in_one(results: Mapping[str, Result]) -> Outcome:
    each = {name: _over_host(results, Division(1), name) for name in _MPI}
    every = _over_host(results, Division(1), *_MPI)
    spans = ", ".join(f"{name} {ratio.span}" for name, ratio in each.items())
    return Outcome(
        f"One container takes these multiples of the host's time: {spans}.",
        graded(every.equal, every.median <= EQUAL),
        _mpi_reason(results),
    )


def _mpi_apart(results: Mapping[str, Result]) -> Outcome:
    each = {name: [_over_host(results, one, name) for one in _APART] for name in _MPI}
    spans = "; ".join(f"{name} {two.span} and {four.span}" for name, (two, four) in each.items())
    every = [ratio for both in each.values() for ratio in both]
    return Outcome(
        "Two and four containers that share only a network take these multiples of the host's"
        f" time: {spans}.",
        graded(min(one.least for one in every) > EQUAL, max(one.most for one in every) > EQUAL),
        _mpi_reason(results),
    )


def _behind_c(results: Mapping[str, Result]) -> Outcome:
    few = _over_c(results, Division(0), Division(1))
    many = _over_c(results, *_APART)
    two, four = (_over_host(results, one, SERIES_C) for one in _APART)
    return Outcome(
        f"In two and four containers that share only a network, a broadcast of buffers takes"
        f" {many.times('the time of C')}, and on the host and in one container"
        f" {few.times('the time of C')}. C's collectives take {two.span} times the host's time in"
        f" two containers, and {four.span} times in four.",
        graded(many.least > EQUAL, many.most > EQUAL),
        _mpi_reason(results),
    )


def _of_paper(containers: int) -> str:
    """Return the paper's span of times over the host's: Table 5, all collectives."""
    column = (1, 2, 4).index(containers)
    ratios = [others[column] / host for host, *others in PAPER.values()]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


_ON_HOST = ", ".join(f"{name} {host:.3f} s" for name, (host, *_) in PAPER.items())
_SLOWER = "It holds if all collectives are more than 10 % slower, and in part if some are."
_EQUAL_RULE = (
    "It holds if all collectives are within 10 % of the host, and in part if the median is at most"
    " 10 % slower."
)
_HBM_RUNS = (_HBM_RUN,)
_MPI_RUNS = (_MPI_RUN, f"{_MPI_RUN}-{INT32}")
_CLAIMS = (
    Claim(
        WOO,
        "Table 5, one container; Figs. 8b, 9b and 10b; section 6, point 2",
        "With 32 processes and buffers in MCDRAM, one container is as fast as the host:"
        f" {_of_paper(1)} times its time ({_ON_HOST}).",
        _one_container,
        _EQUAL_RULE,
        _HBM_RUNS,
    ),
    Claim(
        WOO,
        "Table 5, two and four containers; Figs. 8c, 8d, 9c, 9d, 10c and 10d; section 6, point 2",
        f"Two containers take {_of_paper(2)} times as long as the host, four {_of_paper(4)} times"
        " (32 processes, buffers in MCDRAM).",
        _apart,
        _SLOWER,
        _HBM_RUNS,
    ),
    Claim(
        WOO,
        "Section 6, point 2, with shared memory instead of ports",
        "Several containers communicate less efficiently than processes on the host.",
        _meeting,
        _SLOWER,
        _HBM_RUNS,
    ),
    Claim(
        WOO,
        "Figs. 8c and 8d; section 6, point 2",
        "In two and four containers C stays fast, and a broadcast of buffers in MCDRAM falls behind"
        " C.",
        _behind_c,
        "It holds if buffers take more than 1.1 times C's time in all broadcasts in two and four"
        " containers, and in part if in some. C's own slowdown does not count: the paper's text and"
        " Table 5 say that several containers are slower.",
        _MPI_RUNS,
    ),
    Claim(
        WOO,
        "Table 5, one container, with MPI; Figs. 8b, 9b and 10b",
        "In one container, C, buffers and objects are as fast as on the host.",
        _mpi_in_one,
        _EQUAL_RULE,
        _MPI_RUNS,
    ),
    Claim(
        WOO,
        "Table 5, two and four containers, with MPI; Figs. 8c, 8d, 9c, 9d, 10c and 10d",
        "In two and four containers, all communication is slower than on the host.",
        _mpi_apart,
        _SLOWER,
        _MPI_RUNS,
    ),
)


def _runs() -> Iterator[Run]:
    small = ["--size=1MiB", "--part=1MiB", "--rounds=1", "--calls=3"]
    large = ["--size=256MiB", "--part=16MiB"]
    mpi = [f"--series={','.join((OVER_MPI, *_MPI))}"]
    for suffix, dtype in (("", []), (f"-{INT32}", [f"--dtype={INT32}"])):
        for name, series, times in (
            (_HBM_RUN, [], ["--rounds=9", "--calls=5"]),
            (_MPI_RUN, mpi, ["--rounds=5", "--calls=5"]),
        ):
            yield Run(
                f"{name}{suffix}",
                "papers.containers",
                [*large, *times, *series, *dtype],
                [*small, *series, *dtype],
            )


CONTAINERS = Experiment(
    name="containers",
    figures="Table 5",
    label=Label.MEASURED,
    differs=(
        "4 ranks run collectives on two cores, in containers of podman, in DDR. The paper has MPI"
        " in MCDRAM, with up to 68 ranks on 68 cores, in containers of Docker; its Table 5 has"
        " Python buffers of 32 ranks. The types are float32 and the paper's int32. The series hbm"
        " has plain tensors, and hbm-mpi stages them for MPI. The paper's C is mpi-c-in-place here,"
        " its Python buffer is mpich, and its Python object is mpi-objects. The 16 MB of a gather"
        " are each process' part. In the columns \"apart\" the containers share only podman's"
        " bridge, and communicate through ports. These columns are closest to the paper's"
        " containers, which communicate through ports too. In the other columns the containers have"
        " no network, and share a directory for sockets, through which hbm shares memory. MPI does"
        " not connect several containers without a network."
    ),
    claims=_CLAIMS,
    runs=tuple(_runs()),
    table=_table,
    panels=_panels,
)
