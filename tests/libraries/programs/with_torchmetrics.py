"""Trains with plain DDP, and measures with torchmetrics, which gathers the states of all ranks."""

from __future__ import annotations

import digits
import evidence
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
)


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(digits.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    images, labels = digits.dataset().tensors
    metrics = MetricCollection(
        MulticlassAccuracy(10), MulticlassAUROC(10), MulticlassConfusionMatrix(10)
    )
    mean, seen = MeanMetric(), CatMetric()
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        own = torch.arange(digits.IMAGES)[rank + step :: 3 * size]
        scores = model(images[own])
        loss = cross_entropy(scores, labels[own])
        loss.backward()
        optimizer.step()
        metrics.update(scores.detach(), labels[own])
        mean.update(loss.detach(), weight=len(own))
        losses.append(loss.item())
        seen.update(own[: rank + 1].float())  # rank r adds r + 1 values
    assert seen.compute().numel() == 20 * size * (size + 1) / 2
    results = {f"metric {name}": value for name, value in metrics.compute().items()}
    results |= {"mean": mean.compute(), "seen": seen.compute()}
    evidence.write(options.folder, losses, model, **results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
