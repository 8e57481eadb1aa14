"""Collectives of ranks that are divided over containers: python -m papers.containers --help

It needs root, podman and runc. A series is the collectives of hbm or one way to call MPI. In each
round, every series starts new ranks in each of its divisions, and times each collective a few
times. A sample is one call, on its slowest rank. Compare MPI's series with one another: their calls
follow one another, and hbm's calls begin with a barrier.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from papers.containers.job import results_of
from papers.containers.podman import Division, why_unavailable
from papers.containers.rank import COLLECTIVES, DTYPES, HBM, MPI, SERIES
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    check_names,
    describe_machine,
    sampled,
)
from torch_hbmcomm.sizes import parse_bytes

DIVISIONS = {
    Division(0): "no container",
    Division(1): "podman's, with the host's root file system",
    Division(2): "that share a directory for sockets, and have no network",
    Division(4): "the same",
    Division(2, meeting=False): "that share nothing but podman's bridge: MPI connects them",
    Division(4, meeting=False): "the same",
}
HOST = str(Division(0))

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def divisions_of(series: str) -> list[Division]:
    """Return the divisions that a series is measured in. MPI does not connect containers that have
    no network."""
    return [one for one in DIVISIONS if series == HBM or one.containers < 2 or not one.meeting]


def entry(row: report.Row, found: Measurement) -> Text:
    return report.compared_with(found, row[HOST], reference=True)


@app.command()
def main(
    ranks: Annotated[int, typer.Option(help="A multiple of 4.")] = 4,
    size: Annotated[str, typer.Option(help="Bytes of a broadcast and an allreduce.")] = "64MiB",
    part: Annotated[str, typer.Option(help="Bytes of each rank's part in a gather.")] = "16MiB",
    rounds: Annotated[int, typer.Option(help="Turns of each division.")] = 5,
    calls: Annotated[int, typer.Option(help="In each turn.")] = 5,
    series: Annotated[str, typer.Option(help=f"Of {', '.join(SERIES)}, or all.")] = HBM,
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "float32",
    json: Json = None,
) -> None:
    """Time collectives on the host and in containers.

    The exit status never depends on a time.
    """
    check_file(json)
    if ranks < 4 or ranks % 4:
        raise typer.BadParameter(f"{ranks} ranks do not divide over 4 containers")
    if cause := why_unavailable():
        fail(cause)
    chosen = list(SERIES) if series == "all" else report.names(series)
    try:
        check_names("series", chosen, SERIES)
        check_names("dtype", [dtype], DTYPES)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for name in chosen:
        if name in MPI and (cause := MPI[name].why_unavailable()):
            fail(f"{name}: {cause}")
    sizes = {"gather": parse_bytes(part)}
    collectives = [(name, sizes.get(name, parse_bytes(size))) for name in COLLECTIVES]
    turns = [(name, division) for name in chosen for division in divisions_of(name)]
    samples: dict[tuple[str, int, str, Division], list[float]] = {
        (*collective, *turn): [] for collective in collectives for turn in turns
    }
    for _ in range(rounds):
        for name, division in turns:
            report.say(f"{name}, {division}")
            plan = {"series": name, "dtype": dtype, "collectives": collectives, "calls": calls}
            try:
                found = results_of(division, ranks, "papers.containers.rank", plan)
            except RuntimeError as error:
                fail(str(error))
            for collective, seconds in zip(collectives, found, strict=True):
                samples[(*collective, name, division)] += [one * 1e6 for one in seconds]
    result = Result(
        benchmark="containers",
        machine=describe_machine(),
        plan={"ranks": ranks, "rounds": rounds, "calls": calls},
        contenders={str(division): about for division, about in DIVISIONS.items()},
        notes=[f"{name}: {SERIES[name]}" for name in chosen],
        measurements=[
            sampled(
                {"collective": collective, "dtype": dtype, "bytes": count, "series": name},
                str(division),
                found,
            )
            for (collective, count, name, division), found in samples.items()
        ],
    )
    headings = {
        "collective": lambda one: str(one.of["collective"]),
        "bytes": report.size,
        "series": lambda one: str(one.of["series"]),
    }
    table = report.compared(f"{dtype}, over containers", result.measurements, headings, entry)
    finish(report.group([table], result), result, json)


if __name__ == "__main__":
    app()
