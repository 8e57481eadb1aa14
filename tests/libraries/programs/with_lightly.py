"""Trains without labels, with losses of lightly that gather the embeddings of all ranks."""

from __future__ import annotations

import digits
import evidence
import torch
import torch.distributed as dist
from lightly.loss import BarlowTwinsLoss, NTXentLoss, VICRegLoss
from lightly.models.modules import SimCLRProjectionHead
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    trunk = digits.network()
    model = DistributedDataParallel(nn.Sequential(trunk, SimCLRProjectionHead(10, 32, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criteria = [
        NTXentLoss(temperature=0.5, gather_distributed=True),
        BarlowTwinsLoss(gather_distributed=True),
        VICRegLoss(gather_distributed=True),
    ]
    pixels, _ = digits.dataset().tensors
    torch.manual_seed(rank)  # of the noise
    losses = []
    for step in range(18):
        own = pixels[(rank + step) % (4 * size) :: 4 * size]
        views = torch.cat([own + 0.1 * torch.randn_like(own) for _ in range(2)])
        first, second = model(views).chunk(2)
        loss = criteria[step % 3](first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    evidence.write(options.folder, losses, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
