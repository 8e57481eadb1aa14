"""Repeats the papers' experiments and writes one page: python -m papers.report --help"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from papers.report import page
from papers.report.connections import CONNECTIONS
from papers.report.containers import CONTAINERS
from papers.report.dropping import TABLE_1, TRAINING
from papers.report.experiment import Experiment, Run
from papers.report.gpus import GPUS
from papers.report.images import IMAGES
from papers.report.memory_box import ASYNC_SGD, CLIENTS
from papers.report.messages import MESSAGES_OVER_CONNECTIONS
from papers.report.nodes import NODES
from papers.report.placement import MEMORY_MODES, MEMORY_SPEED, PLACEMENT
from papers.report.processes import PROCESSES
from papers.report.scaling import SCALING
from papers.report.seeds import SEVERAL_SEEDS
from papers.report.thresholds import THRESHOLDS
from papers.report.variants import VARIANTS
from papers.report.verbs import VERBS
from papers.report.ways import LATER_WAYS
from torch_hbmcomm.bench.result import Result

EXPERIMENTS = {
    one.name: one
    for one in (
        PROCESSES,
        PLACEMENT,
        MEMORY_MODES,
        MEMORY_SPEED,
        CONTAINERS,
        CLIENTS,
        ASYNC_SGD,
        CONNECTIONS,
        MESSAGES_OVER_CONNECTIONS,
        VERBS,
        TABLE_1,
        THRESHOLDS,
        TRAINING,
        SEVERAL_SEEDS,
        VARIANTS,
        LATER_WAYS,
        NODES,
        SCALING,
        IMAGES,
        GPUS,
    )
}
_LAST_LINES = 3

app = typer.Typer(add_completion=False)


def measure(run: Run, quick: bool, file: Path) -> str | None:
    """Run a benchmark that writes `file`. Return None, or the cause of its failure."""
    unfinished = file.with_suffix(".part")
    command = [sys.executable, "-m", run.module, *(run.quick if quick else run.arguments)]
    done = subprocess.run(
        [*command, f"--json={unfinished}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode == 0 and unfinished.exists():
        unfinished.rename(file)
        return None
    unfinished.unlink(missing_ok=True)
    said = done.stdout.decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
    return f"{' '.join(command[1:])} ended with {done.returncode}: {' '.join(said)}"


def results_of(experiment: Experiment, place: Path) -> dict[str, Result]:
    """Read the results of an experiment's runs from the directory `place`, by the runs' names."""
    files = [place / f"{run.name}.json" for run in experiment.runs]
    return {file.stem: Result.from_json(file.read_text()) for file in files if file.exists()}


def contents(place: Path) -> list[page.Found]:
    """Read the results of all experiments."""
    return [(one, results_of(one, place)) for one in EXPERIMENTS.values()]


def chosen(only: str | None) -> list[Experiment]:
    """Return the experiments that `only` names, separated by commas. None means all."""
    names = list(EXPERIMENTS) if only is None else only.split(",")
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise typer.BadParameter(
            f"unknown experiments {', '.join(unknown)}; choose from {', '.join(EXPERIMENTS)}"
        )
    return [EXPERIMENTS[name] for name in names]


@app.command()
def report(
    only: Annotated[str | None, typer.Option(help="Names separated by commas.")] = None,
    full: Annotated[bool, typer.Option("--full", help="The papers' sizes, for hours.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the page and the JSON.",
            show_default="build/report/quick or build/report/full",
        ),
    ] = None,
) -> None:
    """Run the benchmarks whose JSON is missing in the folder. Write the page from all JSON there.

    The exit status is 1 if a benchmark failed. The page then has its name and the cause.
    """
    experiments = chosen(only)
    place = folder or Path("build/report", "full" if full else "quick")
    place.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    for experiment in experiments:
        for run in experiment.runs:
            file = place / f"{run.name}.json"
            if file.exists():
                continue
            typer.echo(f"{experiment.name}: {run.name}", err=True)
            if cause := measure(run, not full, file):
                typer.echo(cause, err=True)
                failures[run.name] = cause
    typer.echo(page.write(place, contents(place), failures, quick=not full))
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
