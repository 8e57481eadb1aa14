"""Measures the growth of start-up and small collectives with the ranks, and extrapolates it.

    python -m benchmarks.scaling --help

It fits a model to all numbers of ranks but the largest, and checks the model on the largest.
Figures for clusters are predictions of the model. docs/scaling.md has its assumptions.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from benchmarks.scaling import jobs
from benchmarks.scaling.growths import FEWEST
from benchmarks.scaling.model import gathering
from benchmarks.scaling.tables import ALLREDUCE, START, STORE, WORK, tables
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish, names
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    describe_machine,
    sampled,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measure(ranks: Sequence[int], most_nodes: int, rounds: int) -> Iterator[Measurement]:
    """Yield the samples of every number of ranks. Raises RuntimeError if a rank fails."""
    for count in ranks:
        typer.echo(f"{count} ranks", err=True)
        for contender in jobs.CONTENDERS:
            if "nodes" in contender and count > most_nodes:
                continue
            found = [jobs.started(contender, count) for _ in range(rounds)]
            samples = zip(*found, strict=True)
            for quantity, seconds in zip((START, WORK, ALLREDUCE), samples, strict=True):
                yield _measurement(quantity, count, contender, seconds)
        steps = [jobs.gathered(count) for _ in range(rounds)]
        yield _measurement(STORE, count, "store", steps)


def _measurement(quantity: str, ranks: int, who: str, seconds: Sequence[float]) -> Measurement:
    of = {"quantity": quantity, "ranks": ranks}
    return sampled(of, who, [one * 1e3 for one in seconds], unit="ms")


def render(result: Result) -> RenderableType:
    shown: list[RenderableType] = []
    for title, heading, rows in tables(result):
        table = report.table_of(title, heading)
        for row in rows:
            table.add_row(*row)
        shown.append(table)
    return report.group(shown, result)


@app.command()
def main(
    ranks: Annotated[str, typer.Option(help="Numbers of processes.")] = "2,4,8,16,32,64",
    most_nodes: Annotated[int, typer.Option(help="Most ranks with a node each.")] = 16,
    rounds: Annotated[int, typer.Option(help="Jobs of each kind.")] = 3,
    json: Json = None,
) -> None:
    """Measure how start-up, a small all_reduce and a step in the store grow with the ranks.

    The exit status never depends on a time.
    """
    check_file(json)
    counts = [int(count) for count in names(ranks)]
    if len(set(counts)) < FEWEST or min(counts) < 1:
        raise typer.BadParameter(f"{ranks}: name at least {FEWEST} numbers of ranks")
    costs = jobs.store_costs()
    plan: dict[str, Any] = {"rounds": rounds, "store": asdict(costs)}
    try:
        found = list(measure(counts, most_nodes, rounds))
    except RuntimeError as error:
        fail(str(error))
    simulated = {
        one.of["ranks"]: gathering(one.of["ranks"], costs) * 1e3 / one.median
        for one in found
        if one.of["quantity"] == STORE
    }
    result = Result(
        benchmark="scaling",
        machine=describe_machine(),
        plan=plan,
        contenders=jobs.CONTENDERS | {"store": "hbm's requests to the c10d store, without hbm"},
        notes=[
            "a step in the store, simulated / measured: "
            + ", ".join(f"{count}: {ratio:.2f}" for count, ratio in simulated.items())
            + f" (median {statistics.median(simulated.values()):.2f})"
        ],
        measurements=found,
    )
    finish(render(result), result, json)


if __name__ == "__main__":
    app()
