"""Measures the drift of replicas under async_hook, by optimizer:

    torchrun --standalone --nproc-per-node 4 -m papers.async_sgd.hook_drift

It trains a small network with one box. Distances are between two ranks' weights, relative to their
norm, after all ranks have applied all gradients.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.bench import report

PACE = 0.006  # seconds a step
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "weight decay": lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=1e-2),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def drift(name: str, steps: int, uneven: bool, resync_every: int | None) -> float:
    """Train, and return the largest distance. uneven: odd ranks take only half of the steps."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = OPTIMIZERS[name](model.parameters())
    state = hbmcomm.AsyncState(None, ddp, resync_every=resync_every)
    ddp.register_comm_hook(state, hbmcomm.async_hook)
    truth = torch.linspace(-1, 1, 16).unsqueeze(1)
    data = torch.Generator().manual_seed(dist.get_rank())

    def step(weight: float) -> None:
        inputs = torch.randn(16, 16, generator=data)
        loss = (ddp(inputs) - torch.tanh(inputs @ truth)).square().mean() * weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    slow = 2 if uneven and dist.get_rank() % 2 else 1
    dist.barrier()
    start = time.monotonic()
    for turn in range(steps // slow):
        due = start + PACE * slow * (turn + float(torch.rand((), generator=data)))
        time.sleep(max(0.0, due - time.monotonic()))
        step(1)
    dist.barrier()
    step(0)  # applies the remaining gradients of the other ranks
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    state.close()
    return max(float((a - b).norm() / a.norm()) for a in everyone for b in everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description="Drift of replicas under async_hook.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--resync-every", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = hbmcomm.Options(parameter_server="auto")
    dist.init_process_group("hbm", pg_options=options)
    table = Table("", "equal pace", "uneven pace", "equal, resync", "uneven, resync")
    for name in OPTIMIZERS:
        cells = [
            f"{drift(name, args.steps, uneven, every):.0e}"
            for every in (None, args.resync_every)
            for uneven in (False, True)
        ]
        table.add_row(name, *cells)
    if dist.get_rank() == 0:
        report.show(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
