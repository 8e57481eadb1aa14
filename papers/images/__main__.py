"""The images a second that a small net learns with DistributedDataParallel, by number of ranks.

    python -m papers.images --help

A sample is a step, on its slowest rank. On the host, hbm, Gloo and the bound alternate in the same
processes. The bound is steps without communication. Containers have no network, so in containers
only hbm and the bound alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from papers.containers.job import results_of
from papers.containers.podman import Division, why_unavailable
from papers.images.rank import ALONE, BACKENDS, BATCH
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, Rounds, check_file, fail, finish
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    describe_machine,
    sampled,
)

_ROLE = "papers.images.rank"
_IN_CONTAINERS = ("hbm", ALONE)
_CONTAINERS = (1, 2)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def images_a_second(one: Measurement) -> float:
    """Return the images a second of all ranks together, by the median of the steps."""
    return float(one.of["ranks"]) * BATCH / one.median * 1e3


def _measured(
    division: Division, ranks: int, contenders: Sequence[str], rounds: int, steps: int
) -> Iterator[Measurement]:
    report.say(f"{division}, {ranks} ranks")
    plan = {"contenders": list(contenders), "rounds": rounds, "steps": steps}
    for name, seconds in results_of(division, ranks, _ROLE, plan).items():
        of = {"where": str(division), "ranks": ranks}
        yield sampled(of, name, [1e3 * one for one in seconds], "ms")


@app.command()
def images(
    ranks: Annotated[str, typer.Option(help="Numbers of them, separated by commas.")] = "2,4,8",
    contained: Annotated[
        int, typer.Option(min=0, help="Ranks that are divided over containers; 0: none.")
    ] = 4,
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option(min=1, help="In each turn.")] = 10,
    json: Json = None,
) -> None:
    """Time training steps of a net of 1.2 million parameters, with 8 images for each rank.

    Containers need root, podman and runc. The exit status never depends on a time.
    """
    check_file(json)
    unavailable = {}
    found: list[Measurement] = []
    try:
        for count in map(int, report.names(ranks)):
            found += _measured(Division(0), count, list(BACKENDS), rounds, steps)
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
        plan={"rounds": rounds, "steps": steps, "batch": BATCH},
        contenders=dict.fromkeys(BACKENDS, ""),
        unavailable=unavailable,
        measurements=found,
    )
    table = report.table_of("images", ["where", "ranks", "contender", "images/s", "step, ms"])
    for one in found:
        rate, step = f"{images_a_second(one):.0f}", f"{one.median:.1f}"
        table.add_row(one.of["where"], str(one.of["ranks"]), one.contender, rate, step)
    finish(report.group([table], result), result, json)


if __name__ == "__main__":
    app()
