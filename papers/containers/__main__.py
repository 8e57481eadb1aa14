"""Collectives of ranks that are divided over containers: python -m papers.containers --help

It needs root, podman and runc. The divisions alternate: in each round every division starts new
ranks, and times each collective a few times. A sample is one call, on its slowest rank.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from papers.containers.job import results_of
from papers.containers.podman import Division, why_unavailable
from papers.containers.rank import COLLECTIVES
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
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


def entry(row: report.Row, found: Measurement) -> Text:
    return report.compared_with(found, row[HOST], reference=True)


@app.command()
def main(
    ranks: Annotated[int, typer.Option(help="A multiple of 4.")] = 4,
    size: Annotated[str, typer.Option(help="Bytes of a broadcast and an allreduce.")] = "64MiB",
    part: Annotated[str, typer.Option(help="Bytes of each rank's part in a gather.")] = "16MiB",
    rounds: Annotated[int, typer.Option(help="Turns of each division.")] = 5,
    calls: Annotated[int, typer.Option(help="In each turn.")] = 5,
    json: Json = None,
) -> None:
    """Time collectives of float32 on the host and in containers.

    The exit status never depends on a time.
    """
    check_file(json)
    if ranks < 4 or ranks % 4:
        raise typer.BadParameter(f"{ranks} ranks do not divide over 4 containers")
    if cause := why_unavailable():
        fail(cause)
    sizes = {"gather": parse_bytes(part)}
    collectives = [(name, sizes.get(name, parse_bytes(size))) for name in COLLECTIVES]
    samples: dict[tuple[str, int, Division], list[float]] = {
        (*collective, division): [] for collective in collectives for division in DIVISIONS
    }
    plan = {"collectives": collectives, "calls": calls}
    for _ in range(rounds):
        for division in DIVISIONS:
            report.say(str(division))
            try:
                found = results_of(division, ranks, "papers.containers.rank", plan)
            except RuntimeError as error:
                fail(str(error))
            for collective, seconds in zip(collectives, found, strict=True):
                samples[(*collective, division)] += [one * 1e6 for one in seconds]
    result = Result(
        benchmark="containers",
        machine=describe_machine(),
        plan={"ranks": ranks, "rounds": rounds, "calls": calls},
        contenders={str(division): about for division, about in DIVISIONS.items()},
        measurements=[
            sampled({"collective": name, "bytes": count}, str(division), found)
            for (name, count, division), found in samples.items()
        ],
    )
    headings = {"collective": lambda one: str(one.of["collective"]), "bytes": report.size}
    table = report.compared("float32, over containers", result.measurements, headings, entry)
    finish(report.group([table], result), result, json)


if __name__ == "__main__":
    app()
