"""Training steps under DistributedDataParallel, over several backends in the same processes.

A step is zero_grad, forward, backward with gradients averaged, and SGD. Beside it the same step
without communication (`no_sync`) is measured, and the allreduce of the gradients alone: what the
step takes longer than the first, against the second, tells how much of the communication hides
behind the backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import memory
from torch_hbmcomm.bench import rank
from torch_hbmcomm.bench.contender import Loop, repeated
from torch_hbmcomm.bench.ddp_result import ALLREDUCE, PHASES, STEP, WITHOUT, Measurement, Result
from torch_hbmcomm.bench.interleave import Samples, interleave
from torch_hbmcomm.bench.launch import launch
from torch_hbmcomm.bench.models import MODELS, Model
from torch_hbmcomm.bench.names import check_names
from torch_hbmcomm.bench.result import describe_machine, slowest
from torch_hbmcomm.bench.sizes import MIB
from torch_hbmcomm.bench.torch_backend import OVER_MPI, group_of_all

# Backend, HBMCOMM_NODE, and where the buffers of the allreduce alone lie.
CONTENDERS: dict[str, tuple[str, str | None, Callable[..., torch.Tensor]]] = {
    "hbm": ("hbm", None, memory.empty),
    "hbm-mpi": ("hbm", OVER_MPI, torch.empty),
    "gloo": ("gloo", None, torch.empty),
}

_BUCKET_BYTES = 25 * MIB  # DistributedDataParallel's own default


@dataclass(frozen=True)
class Plan:
    """What to measure. Raises ValueError for a name that does not exist or a count below its least.
    The others are compared with the first contender."""

    contenders: Sequence[str] = ("hbm", "gloo")
    models: Sequence[str] = tuple(MODELS)
    ranks: int = 2
    rounds: int = 21

    def __post_init__(self) -> None:
        check_names("contender", self.contenders, CONTENDERS)
        check_names("model", self.models, MODELS)
        for name, least in (("ranks", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least {least}")


def run(plan: Plan) -> Result:
    """Raises RuntimeError when a rank fails."""
    of_ranks: list[dict[str, Samples]] = launch(
        plan.ranks, measure, plan.contenders, plan.models, plan.rounds
    )
    return Result(
        machine=describe_machine(),
        contenders=list(plan.contenders),
        models={name: MODELS[name].about for name in plan.models},
        ranks=plan.ranks,
        rounds=plan.rounds,
        measurements=[
            Measurement(
                model,
                contender,
                phase,
                slowest([own[model][contender + phase] for own in of_ranks]),
            )
            for model in plan.models
            for contender in plan.contenders
            for phase in PHASES
        ],
    )


def measure(contenders: Sequence[str], models: Sequence[str], rounds: int) -> dict[str, Samples]:
    """In each rank: for each model, the samples of each contender's phases."""
    rank.join()
    samples = {model: _measure_model(MODELS[model], contenders, rounds) for model in models}
    rank.leave()
    return samples


def _measure_model(model: Model, contenders: Sequence[str], rounds: int) -> Samples:
    loops = {}
    for contender in contenders:
        for phase, loop in _phases(model, contender).items():
            loops[contender + phase] = loop
    return interleave(loops, rounds)


def _phases(model: Model, contender: str) -> dict[str, Loop]:
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
    return {phase: repeated(call) for phase, call in calls.items()}
