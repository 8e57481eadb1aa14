"""Trains an embedding with pytorch-metric-learning; its wrappers gather from all ranks."""

from __future__ import annotations

import digits
import evidence
import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss, TripletMarginLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.utils.distributed import (
    DistributedLossWrapper,
    DistributedMinerWrapper,
)
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(digits.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = digits.dataset().tensors
    miner = DistributedMinerWrapper(MultiSimilarityMiner())
    mined = DistributedLossWrapper(TripletMarginLoss())
    efficient = DistributedLossWrapper(NTXentLoss(), efficient=True)
    memory = DistributedLossWrapper(CrossBatchMemory(NTXentLoss(), 10, memory_size=256))
    losses = []
    for step in range(18):
        own = torch.arange(digits.IMAGES)[(rank + step) % (8 * size) :: 8 * size]
        embeddings = model(images[own])
        if step % 3 == 0:
            loss = mined(embeddings, labels[own], miner(embeddings, labels[own]))
        else:
            loss = (efficient if step % 3 == 1 else memory)(embeddings, labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    evidence.write(options.folder, losses, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
