"""Trains a task with one of several ways to send gradients, and measures the model's quality.

The processes of the default group emulate RANKS ranks. If there are fewer processes, each averages
the gradients of several ranks' batches. The result is the same as with RANKS processes. The reason
is that the approximations of the hook and of PowerSGD are linear in the ranks' gradients, and use a
basis of the average. tests/python/low_rank/test_low_rank.py checks that one rank stands for all.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from papers.layer_drop.hooks import BUCKET_MIB
from papers.layer_drop.tasks import Task
from torch_hbmcomm.layer_drop.config import Target

RANKS = 4
PLAIN = "plain"
TERNARY = "ternary"
CONTENDERS = ("hook", "PowerSGD", "bfloat16", *get_args(Target), TERNARY)
"""PLAIN's contenders. "hook" and "bfloat16" are low_rank_hook. The targets of LayerDrop are
layer_drop_hook, and so is TERNARY, which has the target "blocks"."""
SERVERS: dict[str, type[hbmcomm.ParameterServer] | type[hbmcomm.SyncParameterServer]] = {
    "server": hbmcomm.ParameterServer,
    "sync-server": hbmcomm.SyncParameterServer,
}
"""Contenders that train with a parameter server instead of DDP. They drop layers, and with ratio 0
send all. They need RANKS processes, in a group that has a memory box."""
_VANILLA = 2  # first steps that PowerSGD sends whole; PyTorch's minimum
_LEAST_SAVED = 2  # least compression of a matrix that PowerSGD approximates
_LOOKS = 10  # evaluations of the model during the training

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters, rate: torch.optim.AdamW(parameters, rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
    "SGD": lambda parameters, rate: torch.optim.SGD(parameters, rate),
}


@dataclass
class Learned:
    """A training so far.

    share: sent share of the gradients' bytes
    steps, seconds, quality: at each evaluation; the seconds leave out evaluations
    loss: mean of this process's losses since the evaluation before
    """

    share: float = 1.0
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    quality: list[float] = field(default_factory=list)


def learn(
    task: Task, optimizer: str, contender: str, ratio: float, seed: int, steps: int, rate: float
) -> Iterator[Learned]:
    """Train, and yield after each evaluation. `seed` sets the first weights and the order of data.

    With ParameterServer the evaluations before the end are of this worker's model.

    rate: the highest learning rate
    """
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.model(), bucket_cap_mb=BUCKET_MIB.get(contender))
    share = _register(ddp, contender, ratio, steps)
    steps_it = OPTIMIZERS[optimizer](ddp.parameters(), rate)
    server = _server(ddp.module, steps_it, contender, ratio) if contender in SERVERS else None
    draw = torch.Generator().manual_seed(seed)
    learned = Learned()
    losses: list[float] = []
    now, begin = 0.0, time.perf_counter()
    for step in range(steps):
        for group in steps_it.param_groups:
            group["lr"] = rate * schedule(step, steps)
        inputs, targets = task.examples(RANKS * task.batch, draw)
        steps_it.zero_grad()
        with nullcontext() if server is None else ddp.no_sync():
            losses.append(backward(task, ddp, inputs, targets))
        (server or steps_it).step()
        if (step + 1) * _LOOKS % steps < _LOOKS:
            now += time.perf_counter() - begin
            if server is not None:
                learned.share = _pushed(server, ddp.module)
                if step + 1 == steps:
                    _end(server)
            else:
                learned.share = share()
            learned.steps.append(step + 1)
            learned.seconds.append(now)
            learned.loss.append(statistics.fmean(losses))
            losses.clear()
            learned.quality.append(task.quality(ddp.module))
            yield learned
            dist.barrier()
            begin = time.perf_counter()


def backward(task: Task, ddp: DistributedDataParallel, inputs: Tensor, targets: Tensor) -> float:
    """Compute the gradients of this process's part of the batch. Returns the part's loss.

    A model with BatchNorm is computed rank by rank, so that each computation has the statistics of
    one rank's batch. As under DDP, the running statistics are of the group's first rank.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = RANKS // world if any(isinstance(one, _BatchNorm) for one in ddp.modules()) else 1
    inputs, targets = inputs.chunk(world)[rank], targets.chunk(world)[rank]
    own = zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
    total = 0.0
    for left, (some, labels) in reversed(list(enumerate(own))):
        before = [buffer.clone() for buffer in ddp.module.buffers()]
        with ddp.no_sync() if left > 0 else nullcontext():
            loss = task.loss(ddp(some), labels) / parts
            loss.backward()
        total += float(loss.detach())
        if left > 0:
            for buffer, value in zip(ddp.module.buffers(), before, strict=True):
                buffer.copy_(value)
    return total


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate.

    It rises over a tenth of the steps, and then falls to a twentieth along a cosine.
    """
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return min(1.0, (step + 1) / (0.1 * steps)) * (0.05 + 0.95 * cosine)


def _server(
    model: nn.Module, optimizer: torch.optim.Optimizer, contender: str, ratio: float
) -> hbmcomm.ParameterServer | hbmcomm.SyncParameterServer:
    drop = hbmcomm.LayerDrop(ratio=ratio) if ratio else None
    return SERVERS[contender](model, optimizer, drop=drop)


def _end(server: hbmcomm.ParameterServer | hbmcomm.SyncParameterServer) -> None:
    """End the training. All models are equal then."""
    if isinstance(server, hbmcomm.ParameterServer):
        server.finish(wait=True)
        server.pull()
    server.close()


def _pushed(
    server: hbmcomm.ParameterServer | hbmcomm.SyncParameterServer, model: nn.Module
) -> float:
    """Return the sent part of the bytes of all steps."""
    counts = server.stats()
    if isinstance(server, hbmcomm.ParameterServer):
        whole = sum(one.nbytes for one in model.parameters())
        return counts["pushed_bytes"] / (counts["steps"] * whole)
    return counts["gradient_bytes"] / counts.get(
        "gradient_bytes_undropped", counts["gradient_bytes"]
    )


def _register(
    ddp: DistributedDataParallel, contender: str, ratio: float, steps: int
) -> Callable[[], float]:
    """Register the contender's hook. Return a function that returns the share sent so far."""
    state: hbmcomm.LowRankState | hbmcomm.LayerDropState
    if contender in ("hook", "bfloat16"):
        narrow = contender == "bfloat16"
        config = hbmcomm.LowRank(
            ratio=round(1 - 2 * (1 - ratio), 6) if narrow else ratio,
            wire_dtype=torch.bfloat16 if narrow else None,
        )
        state = hbmcomm.LowRankState(ddp, config, log_every=None)
        ddp.register_comm_hook(state, hbmcomm.low_rank_hook)
        return lambda: _share(state)
    if contender in (*get_args(Target), TERNARY):
        ternary = contender == TERNARY
        dropping = hbmcomm.LayerDrop(
            ratio=ratio,
            target="blocks" if ternary else contender,  # type: ignore[arg-type]
            levels=1 if ternary else None,
        )
        state = hbmcomm.LayerDropState(ddp, dropping, log_every=None)
        ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
        return lambda: _share(state)
    if contender == "PowerSGD":
        parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        # In each step, the hook sends 1 - ratio of all gradients' bytes. In its first 1/(1 - ratio)
        # steps together, it also sends the part `ratio` of one step's gradients. PowerSGD may send
        # as many bytes in all steps together. In its first _VANILLA steps, it sends all bytes.
        most = ((1 - ratio) * steps + ratio - _VANILLA) / max(steps - _VANILLA, 1)
        rank, share = power_sgd_rank([list(one.shape) for one in parameters], most)
        power = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=_VANILLA
        )
        ddp.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
        return lambda: (_VANILLA + (steps - _VANILLA) * share) / steps
    return lambda: 1.0


def _share(state: hbmcomm.LowRankState | hbmcomm.LayerDropState) -> float:
    counts = state.summary()
    return counts["sent_bytes"] / counts["gradient_bytes"]


def power_sgd_rank(shapes: list[list[int]], share: float) -> tuple[int, float]:
    """Return a rank of PowerSGD, and the share of all elements that it sends in a step.

    The rank is the largest with which PowerSGD sends at most `share` of all elements, or 1.
    """

    def sent(rank: int) -> float:
        found = 0
        for shape in shapes:
            numel, rows = math.prod(shape), shape[0]
            factors = rank * (rows + numel // rows)
            compressed = len(shape) > 1 and factors * _LEAST_SAVED < numel
            found += factors if compressed else numel
        return found / sum(map(math.prod, shapes))

    rank = 1
    while sent(rank + 1) <= share:
        rank += 1
    return rank, sent(rank)
