"""The images a second that AlexNet learns with DistributedDataParallel, by number of ranks.

    python -m papers.images --help

A sample is a step, on its slowest rank. On the host, hbm, Gloo, the bound and MPI in C take turns
in the same processes. The bound is steps without communication. MPI in C has no training: its
sample is the all_reduces of DDP's buckets, and its step is a step without communication, followed
by these all_reduces. Containers have no network, so in containers only hbm and the bound alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from benchmarks.collectives.native import MpiInC
from papers.containers.job import results_of
from papers.containers.podman import Division, why_unavailable
from papers.images.rank import ALONE, BATCH, CONTENDERS, HBM, MPI
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, Rounds, Row, check_file, fail, finish
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    describe_machine,
    sampled,
)

NET = "AlexNet"
_ROLE = "papers.images.rank"
_IN_CONTAINERS = (HBM, ALONE)
_CONTAINERS = (1, 2)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def step_ms(row: Row, name: str) -> float:
    """Return the median of a contender's steps, in ms."""
    median = row[name].median
    return row[ALONE].median + median if name == MPI else median


def images_a_second(row: Row, name: str) -> float:
    """Return the images a second of all ranks together, by the median of the steps."""
    return float(row[name].of["ranks"]) * BATCH / step_ms(row, name) * 1e3


def communication(row: Row, name: str) -> float:
    """Return the share of a step that communication adds. At least 0, because the steps of a
    contender may happen to be faster than the steps without communication."""
    return max(0.0, 1 - row[ALONE].median / step_ms(row, name))


def _measured(
    division: Division, ranks: int, contenders: Sequence[str], rounds: int, steps: int
) -> Iterator[Measurement]:
    report.say(f"{division}, {ranks} ranks")
    plan = {"contenders": list(contenders), "rounds": rounds, "steps": steps}
    found = results_of(division, ranks, _ROLE, plan)
    for name, seconds in found["seconds"].items():
        of = {"where": str(division), "ranks": ranks}
        curves = {"buckets_bytes": found["buckets"]} if name == MPI else {}
        yield sampled(of, name, [1e3 * one for one in seconds], "ms", curves=curves)


@app.command()
def images(
    ranks: Annotated[str, typer.Option(help="Numbers of them, separated by commas.")] = "2,4,8",
    contained: Annotated[
        int, typer.Option(min=0, help="Ranks that are divided over containers; 0: none.")
    ] = 4,
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option(min=1, help="In each turn.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="One step with 2 ranks, as a check.")
    ] = False,
    json: Json = None,
) -> None:
    """Time training steps of AlexNet, with 8 random images for each rank.

    Containers need root, podman and runc. MPI needs the native programs (make bench). The exit
    status never depends on a time.
    """
    check_file(json)
    if quick:
        ranks, contained, rounds, steps = "2", 2, 1, 1
    unavailable = {}
    on_host = list(CONTENDERS)
    if cause := MpiInC().why_unavailable():
        unavailable[MPI] = cause
        on_host.remove(MPI)
    found: list[Measurement] = []
    try:
        for count in map(int, report.names(ranks)):
            found += _measured(Division(0), count, on_host, rounds, steps)
        if contained and (cause := why_unavailable()):
            unavailable["containers"] = cause
        elif contained:
            for containers in _CONTAINERS:
                division = Division(containers)
                found += _measured(division, contained, _IN_CONTAINERS, rounds, steps)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except RuntimeError as error:
        fail(str(error))
    result = Result(
        benchmark="images",
        machine=describe_machine(),
        plan={"rounds": rounds, "steps": steps, "batch": BATCH, "net": NET},
        contenders=CONTENDERS,
        unavailable=unavailable,
        measurements=found,
    )
    heading = ["where", "ranks", "contender", "images/s", "step, ms", "communication"]
    table = report.table_of("images", heading)
    for row in report.rows(found):
        for name, one in row.items():
            rate, step = f"{images_a_second(row, name):.1f}", f"{step_ms(row, name):.1f}"
            share = f"{communication(row, name):.0%}"
            table.add_row(one.of["where"], str(one.of["ranks"]), name, rate, step, share)
    finish(report.group([table], result), result, json)


if __name__ == "__main__":
    app()
