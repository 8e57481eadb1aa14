"""Trains with torch.distributed.pipelining. The program's own argument is the schedule."""

from __future__ import annotations

from typing import Any

import digits
import evidence
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import cross_entropy

# The class of the schedule, and the number of stages on each rank.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
}
MICROBATCHES = 4


def network(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    sections: list[nn.Module] = [
        nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(stages - 1)
    ]
    return [*sections, nn.Linear(64, 10)]


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule_class, stages_per_rank = SCHEDULES[options.rest[0]]
    stages = size * stages_per_rank
    # "zbv" visits the ranks forwards, then backwards. The other schedules visit them round-robin.
    owners = [stage % size for stage in range(stages)]
    if options.rest[0] == "zbv":
        owners = [*range(size), *reversed(range(size))]
    sections = network(stages)
    own = [
        PipelineStage(sections[stage], stage, stages, torch.device("cpu"))
        for stage in range(stages)
        if owners[stage] == rank
    ]
    schedule = schedule_class(
        own if stages_per_rank > 1 else own[0], MICROBATCHES, loss_fn=cross_entropy
    )
    optimizer = torch.optim.Adam(
        [value for stage in own for value in stage.submod.parameters()], lr=0.01
    )
    first, last = owners[0] == rank, owners[-1] == rank
    images, labels = digits.dataset().tensors
    losses = []
    for step in range(8):
        chosen = torch.arange(digits.IMAGES)[step % 4 :: 8]
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        schedule.step(
            *([images[chosen]] if first else []),
            **({"target": labels[chosen], "losses": found} if last else {}),
        )
        optimizer.step()
        mean = torch.stack(found).mean().detach() if last else torch.zeros(())
        dist.broadcast(mean, owners[-1])
        losses.append(mean.item())
    for section, owner in zip(sections, owners, strict=True):
        for value in section.parameters():
            dist.broadcast(value.detach(), owner)
    evidence.write(options.folder, losses, nn.ModuleList(sections), dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
