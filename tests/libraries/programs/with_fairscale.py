"""Trains with fairscale's OSS, which divides the optimizer's state, and ShardedDDP."""

from __future__ import annotations

import digits
import evidence
import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch.nn.functional import cross_entropy


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    network = digits.network()
    optimizer = OSS(network.parameters(), optim=torch.optim.Adam, lr=0.01)
    model = ShardedDataParallel(network, optimizer, reduce_buffer_size=1 << 16)
    images, labels = digits.dataset().tensors
    losses = []
    for step in range(16):
        own = torch.arange(digits.IMAGES)[rank + step % 8 :: 8 * size]
        model.zero_grad()
        if step % 4 == 0:
            with model.no_sync():
                cross_entropy(model(images[own]), labels[own]).backward()
        loss = cross_entropy(model(images[own]), labels[own])
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        losses.append(loss.item())
    optimizer.consolidate_state_dict(recipient_rank=0)
    evidence.write(options.folder, losses, model, dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
