"""Training steps under DistributedDataParallel, over several backends in the same processes.

A step is zero_grad, forward, backward with gradients averaged, and SGD. Two more things are
measured: the same step without communication (`no_sync`), and the allreduce of the gradients alone.
The column "communication adds" is the step's time minus its time without communication. This
difference divided by the time of the allreduce alone is the part of the communication that the
backward pass does not hide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import RenderableType
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import memory
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.contenders import OVER_MPI, group_of_all
from torch_hbmcomm.bench.ranks import join, launch, leave, slowest, take_turns
from torch_hbmcomm.bench.report import format_time
from torch_hbmcomm.bench.result import (
    Result,
    check_counts,
    check_names,
    describe_machine,
    measurements,
)
from torch_hbmcomm.bench.rounds import Samples, Timed, timed
from torch_hbmcomm.sizes import MIB

# For each contender: its backend, the value of HBMCOMM_NODE, and the function that allocates the
# buffers for ALLREDUCE.
CONTENDERS: dict[str, tuple[str, str | None, Callable[..., torch.Tensor]]] = {
    "hbm": ("hbm", None, memory.empty),
    "hbm-mpi": ("hbm", OVER_MPI, torch.empty),
    "gloo": ("gloo", None, torch.empty),
}

STEP = "step"
WITHOUT = "step without communication"
ALLREDUCE = "allreduce alone"
PHASES = (STEP, WITHOUT, ALLREDUCE)

_BUCKET_BYTES = 25 * MIB  # DistributedDataParallel's own default
_COLUMNS = (
    *("backend", STEP, "without communication", "communication adds", ALLREDUCE),
    "of it hidden",
)


@dataclass(frozen=True)
class Model:
    name: str
    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]


def _layers(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


# Two extremes; real models are between them.
MODELS = {
    model.name: model
    for model in (
        Model(
            "communication-bound",
            "6 linear layers of 2048 x 2048 (25 M parameters), a batch of 1",
            lambda: _layers(6, 2048),
            lambda: torch.randn(1, 2048),
        ),
        Model(
            "compute-bound",
            "8 linear layers of 512 x 512 (2 M parameters), a batch of 512",
            lambda: _layers(8, 512),
            lambda: torch.randn(512, 512),
        ),
    )
}


@dataclass(frozen=True)
class DdpPlan:
    """A choice of models and contenders. The first contender is compared with the others.

    Raises ValueError for a name that does not exist, or a count below its minimum.
    """

    contenders: Sequence[str] = ("hbm", "gloo")
    models: Sequence[str] = tuple(MODELS)
    ranks: int = 2
    rounds: int = 21

    def __post_init__(self) -> None:
        check_names("contender", self.contenders, CONTENDERS)
        check_names("model", self.models, MODELS)
        check_counts(self, {"ranks": 2, "rounds": 1})


def run(plan: DdpPlan) -> Result:
    """Measure. Raises RuntimeError when a rank fails."""
    of_ranks: list[dict[str, dict[tuple[str, str], Samples]]] = launch(
        plan.ranks, _measure, plan.contenders, plan.models, plan.rounds
    )
    found = []
    for model in plan.models:
        for contender in plan.contenders:
            for phase in PHASES:
                samples = slowest([own[model][contender, phase] for own in of_ranks])
                found += measurements({"model": model, "phase": phase}, {contender: samples})
    return Result(
        benchmark="ddp",
        machine=describe_machine(),
        plan={"ranks": plan.ranks, "rounds": plan.rounds},
        sections={name: MODELS[name].about for name in plan.models},
        contenders=dict.fromkeys(plan.contenders, ""),
        measurements=found,
    )


def _measure(
    contenders: Sequence[str], models: Sequence[str], rounds: int
) -> dict[str, dict[tuple[str, str], Samples]]:
    """Return, in each rank, for each model, the samples of each contender's phases."""
    join()
    found = {model: _measure_model(MODELS[model], contenders, rounds) for model in models}
    leave()
    return found


def _measure_model(
    model: Model, contenders: Sequence[str], rounds: int
) -> dict[tuple[str, str], Samples]:
    """Measure one model. A contender is measured alone in rounds that have only its own phases."""
    everyone = {contender: phases_of(model, contender) for contender in contenders}
    found = take_turns(
        {
            f"{name}/{phase}": one
            for name, phases in everyone.items()
            for phase, one in phases.items()
        },
        rounds,
        alone=(),
    )
    for name, phases in everyone.items() if len(contenders) > 1 else ():
        for phase, own in take_turns(phases, rounds, alone=()).items():
            found[f"{name}/{phase}"].alone = own.interleaved
    return {(name, phase): found[f"{name}/{phase}"] for name in contenders for phase in PHASES}


def phases_of(model: Model, contender: str) -> dict[str, Timed]:
    """Return the loop of each phase. All ranks call it. REQUIRES: join()."""
    backend, node, empty = CONTENDERS[contender]
    group = group_of_all(backend, node)
    torch.manual_seed(dist.get_rank())
    network = DistributedDataParallel(
        model.build(), process_group=group, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, fused=True)
    batch = model.batch()

    def step() -> None:
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()

    def step_without() -> None:
        with network.no_sync():
            step()

    parameters = sum(parameter.numel() for parameter in network.parameters())
    gradients = empty(parameters, dtype=torch.float32).fill_(0)
    buckets = gradients.split(_BUCKET_BYTES // gradients.itemsize)

    def allreduce() -> None:
        works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    calls = {STEP: step, WITHOUT: step_without, ALLREDUCE: allreduce}
    return {phase: timed(call) for phase, call in calls.items()}


def render(result: Result) -> RenderableType:
    """Return a table for each model."""
    tables = [_table(result, model) for model in result.sections]
    return report.group(tables, result)


def _table(result: Result, model: str) -> Table:
    found = {
        (one.contender, one.of["phase"]): one
        for one in result.measurements
        if one.of["model"] == model
    }
    table = report.table_of(f"{model}: {result.sections[model]}", _COLUMNS, lines=True)
    subject = found[next(iter(result.contenders)), STEP]
    for contender in result.contenders:
        step, without, alone = (found[contender, phase] for phase in PHASES)
        adds = step.median - without.median
        table.add_row(
            contender,
            report.compared_with(step, subject, reference=False),
            report.times(without),
            format_time(adds),
            report.times(alone),
            f"{max(0.0, 1 - adds / alone.median):.0%}",
        )
    return table
