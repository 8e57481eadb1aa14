"""Two workers train a model over RDMA. Each compares its model with one trained without a box.

Part of torch_programs.py.
"""

from __future__ import annotations

import torch
import verbs_workers
from torch import nn
from torch.nn.functional import mse_loss

from torch_hbmcomm import ParameterServer, smb

WORKERS, STEPS, BATCH = 2, 10, 8


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 1))


def data(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * WORKERS + worker)
    inputs = torch.randn(BATCH, 300, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True)


def alone() -> list[torch.Tensor]:
    """Return the parameters after a training in one process, on the batches of all workers."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for worker in range(WORKERS):
            inputs, targets = data(step, worker)
            (mse_loss(model(inputs), targets) / WORKERS).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def work(worker: int, url: str) -> None:
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    box = smb.connect(url, verbs_workers.TOKEN, transport="verbs", connect_timeout=300)
    with ParameterServer(
        model, optimizer, box=box, staleness=0, workers=WORKERS, timeout=600
    ) as server:
        for step in range(STEPS):
            inputs, targets = data(step, worker)
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            server.step()
    for found, wanted in zip(model.parameters(), alone(), strict=True):
        torch.testing.assert_close(found.detach(), wanted)
    print(f"worker {worker} agrees over {box.transport}", flush=True)
    box.close()


def main() -> None:
    verbs_workers.run(WORKERS, work)
