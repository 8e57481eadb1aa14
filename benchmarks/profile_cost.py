"""Measures the cost of a profile: training steps and small all_reduces, with and without one.

    python -m benchmarks.profile_cost --json profile_cost.json

The same processes take a pair of samples again and again: one without a profile (off) and one in
hbmcomm.profile() (on). Every second pair takes the sample with the profile first. A sample is the
mean time of several calls after an uncounted one, on the slowest rank. Starting a profile and
writing its file are not in the time.

`hbmcomm bench ddp` has the same steps. The all_reduce has 8 B. Without a profile its time shows
what the recording code costs while it is off: compare it with the time in a checkout without that
code.
"""

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import RenderableType

import torch_hbmcomm
from benchmarks import pairs
from benchmarks.pairs import Pair
from torch_hbmcomm.bench import ddp, report
from torch_hbmcomm.bench.contenders import group_of_all
from torch_hbmcomm.bench.ranks import join, launch, leave
from torch_hbmcomm.bench.report import Json, Ranks, check_file, fail, finish, names
from torch_hbmcomm.bench.result import Result, check_counts, check_names, describe_machine
from torch_hbmcomm.bench.rounds import Timed, timed

OFF, ON = "off", "on"
SMALL = "all_reduce of 8 B"
_SMALL_CALLS = 2000  # in a sample

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class CostPlan:
    """A choice of models, and the number of pairs.

    Raises ValueError for a name that does not exist, or a count below its minimum.
    """

    models: Sequence[str] = tuple(ddp.MODELS)
    ranks: int = 2
    pairs: int = 20
    steps: int = 10  # in a sample

    def __post_init__(self) -> None:
        check_names("model", self.models, ddp.MODELS)
        check_counts(self, {"ranks": 2, "pairs": 10, "steps": 1})


def run(plan: CostPlan) -> Result:
    """Measure. Raises RuntimeError when a rank fails."""
    of_ranks: list[dict[str, list[Pair]]] = launch(
        plan.ranks, _measure, plan.models, plan.pairs, plan.steps
    )
    found = []
    for work in of_ranks[0]:
        of_work = pairs.slowest([own[work] for own in of_ranks])
        found += pairs.measurements({"work": work}, (OFF, ON), of_work)
    return Result(
        benchmark="profile_cost",
        machine=describe_machine(),
        plan={"ranks": plan.ranks, "pairs": plan.pairs, "steps": plan.steps},
        contenders={OFF: "without a profile", ON: "in hbmcomm.profile()"},
        measurements=found,
    )


def _measure(models: Sequence[str], number: int, steps: int) -> dict[str, list[Pair]]:
    """Return, in each rank, the pairs of each kind of work."""
    join()
    found = {}
    for name in models:
        step = ddp.phases_of(ddp.MODELS[name], "hbm")[ddp.STEP]
        found[f"step, {name}"] = _take_pairs(step, number, steps)
    group, small = group_of_all("hbm"), torch.zeros(2)
    reduce_small = timed(lambda: dist.all_reduce(small, group=group))
    found[SMALL] = _take_pairs(reduce_small, number, _SMALL_CALLS)
    leave()
    return found


def _take_pairs(loop: Timed, number: int, calls: int) -> list[Pair]:
    def sample(profile: AbstractContextManager[None]) -> float:
        with profile:
            dist.barrier()
            return loop(1, calls)[0]

    with tempfile.TemporaryDirectory(prefix="hbmcomm-bench-") as folder:
        return pairs.take(
            lambda: sample(nullcontext()), lambda: sample(torch_hbmcomm.profile(folder)), number
        )


def render(result: Result) -> RenderableType:
    """Return a table of the times and ratios."""
    title = f"Calls with and without a profile ({result.plan['pairs']} pairs)"
    return report.group([pairs.table(title, "work", (OFF, ON), result.measurements)], result)


@app.command()
def main(
    models: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    ranks: Ranks = 2,
    number: Annotated[
        int, typer.Option("--pairs", min=10, help="Pairs of each kind of work.")
    ] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Training steps in a sample.")] = 10,
    json: Json = None,
) -> None:
    """Measure training steps and small all_reduces with and without a profile.

    The exit status never depends on a time.
    """
    check_file(json)
    try:
        plan = CostPlan(
            models=list(ddp.MODELS) if models == "all" else names(models),
            ranks=ranks,
            pairs=number,
            steps=steps,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = run(plan)
    except RuntimeError as error:
        fail(str(error))
    finish(render(result), result, json)


if __name__ == "__main__":
    app()
