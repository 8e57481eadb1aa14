"""Trains a small ResNet of timm, as timm's train.py does."""

from __future__ import annotations

from argparse import Namespace

import digits
import evidence
import timm
import torch
import torch.distributed as dist
from timm.data.distributed_sampler import OrderedDistributedSampler, RepeatAugSampler
from timm.optim import create_optimizer_v2
from timm.utils import (
    AverageMeter,
    ModelEmaV3,
    accuracy,
    dispatch_clip_grad,
    distribute_bn,
    init_distributed_device,
    reduce_tensor,
)
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def dataset() -> TensorDataset:
    pixels, labels = digits.dataset().tensors
    return TensorDataset(interpolate(pixels.view(-1, 1, 8, 8), scale_factor=4), labels)


def main() -> None:
    options = evidence.options()
    arguments = Namespace(device="cpu", dist_backend=options.backend)
    init_distributed_device(arguments)
    size = arguments.world_size
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    average = ModelEmaV3(network, decay=0.9)
    model = DistributedDataParallel(network)
    optimizer = create_optimizer_v2(model, opt="lamb", lr=0.02)
    images = dataset()
    sampler = RepeatAugSampler(images, num_repeats=2, selected_round=64)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for pixels, labels in DataLoader(images, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            loss = cross_entropy(model(pixels), labels)
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            average.update(network)
            losses.append(reduce_tensor(loss.detach(), size).item())
        distribute_bn(model, size, reduce=epoch == 0)  # then from rank 0

    right = AverageMeter()
    model.eval()
    for pixels, labels in DataLoader(
        images, batch_size=32, sampler=OrderedDistributedSampler(images)
    ):
        with torch.no_grad():
            [share] = accuracy(model(pixels), labels)
        right.update(reduce_tensor(share, size).item(), len(labels))
    buffers = torch.cat([buffer.double().flatten() for buffer in network.buffers()])
    averages = torch.nn.utils.parameters_to_vector(average.module.parameters()).detach()
    evidence.write(
        options.folder, losses, model, right=right.avg, buffers=buffers, averages=averages
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
