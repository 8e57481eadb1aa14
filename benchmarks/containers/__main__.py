"""Collectives of ranks that are divided over containers: python -m benchmarks.containers --help

Root, podman and runc are needed. The divisions take turns: in each round every one of them starts
its ranks anew, and times each collective a few times. A sample is one call, on its slowest rank.
"""

from __future__ import annotations

import json as json_module
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from benchmarks.containers.podman import OUTPUT, Division, started, why_unavailable
from benchmarks.containers.rank import COLLECTIVES, RESULTS
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish
from torch_hbmcomm.bench.result import Measurement, Result, describe_machine
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
_ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 600  # seconds, for the ranks of a division in one round

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def turn(
    division: Division, ranks: int, collectives: Sequence[tuple[str, int]], calls: int
) -> list[list[float]]:
    """Return the seconds of each call of each collective. Raises RuntimeError."""
    # Its path is that of sockets, too, which must be short.
    with tempfile.TemporaryDirectory(prefix="hbmcomm-", dir="/tmp") as name:
        folder = Path(name)
        plan = folder / "plan.json"
        plan.write_text(json_module.dumps({"collectives": collectives, "calls": calls}))
        command = [sys.executable, "-m", "benchmarks.containers.rank", str(plan)]
        settings = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        with started(division, ranks, command, folder, settings) as running:
            try:
                codes: list[int | None] = [process.wait(_LIMIT) for process in running]
            except subprocess.TimeoutExpired:
                codes = [process.poll() for process in running]
        if any(code != 0 for code in codes):
            output = (folder / OUTPUT).read_text()
            raise RuntimeError(f"{division}: the ranks ended with {codes}: {output}")
        found: list[list[float]] = json_module.loads((folder / RESULTS).read_text())
        return found


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
    for _ in range(rounds):
        for division in DIVISIONS:
            report.say(str(division))
            try:
                found = turn(division, ranks, collectives, calls)
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
            Measurement({"collective": name, "bytes": count}, str(division), found)
            for (name, count, division), found in samples.items()
        ],
    )
    headings = {"collective": lambda one: str(one.of["collective"]), "bytes": report.size}
    table = report.compared("float32, over containers", result.measurements, headings, entry)
    finish(report.group([table], result), result, json)


if __name__ == "__main__":
    app()
