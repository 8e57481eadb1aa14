"""Trains with Lightning Fabric, which starts the other ranks itself."""

from __future__ import annotations

import digits
import evidence
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    options = evidence.options()
    fabric = Fabric(
        accelerator="cpu", devices=options.ranks,
        strategy=DDPStrategy(process_group_backend=options.backend) if options.backend else "ddp",
    )  # fmt: skip
    fabric.launch()
    fabric.seed_everything(0)
    network = digits.network()
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(digits.dataset(), batch_size=16, shuffle=True))
    losses = []
    for step, (images, labels) in enumerate(loader):
        accumulating = step % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = cross_entropy(model(images), labels)
            fabric.backward(loss)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    gathered = fabric.all_gather(torch.tensor(losses))
    mean = fabric.all_reduce(torch.tensor(losses))
    received = fabric.broadcast({"rank": fabric.global_rank})
    assert received == {"rank": 0}, received
    fabric.barrier()
    evidence.write(options.folder, losses, model, gathered=gathered, mean=mean)


if __name__ == "__main__":
    main()
