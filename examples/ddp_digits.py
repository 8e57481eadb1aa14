"""Train a small convolutional network on handwritten digits with DistributedDataParallel.

Every rank trains on its own share of 1,437 images of 8 x 8 pixels. DDP averages the gradients over
the process group in each step, so all ranks hold the same network.

    torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py

Exits non-zero when the test accuracy is below 97 %.
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 0
BATCH = 16  # per rank
WANTED_ACCURACY = 0.97


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return four fifths of the images and labels for training, one fifth for the test.

    Images have the shape (N, 1, 8, 8) and values in [0, 1].
    """
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=SEED,
                                   stratify=labels)  # fmt: skip
    targets = torch.tensor(labels)
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


def network() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 2 * 2, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    return float((model(images).argmax(dim=1) == labels).float().mean())


def train(epochs: int, console: Console) -> float:
    """Return the accuracy on the test images. It is equal on all ranks."""
    train_set, test_set = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = OneCycleLR(optimizer, max_lr=5e-3, total_steps=epochs * len(loader))
    console.print(f"Training on {dist.get_world_size()} ranks over [bold]{dist.get_backend()}")
    reached = 0.0
    with Progress(console=console) as progress:
        bar = progress.add_task("training", total=epochs * len(loader))
        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # another shuffle in every epoch, the same on all ranks
            total = torch.zeros(())
            for images, labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()  # DDP averages the gradients here, while they are computed
                optimizer.step()
                schedule.step()
                total += loss.detach()
                progress.advance(bar)
            dist.all_reduce(total)
            mean = total.item() / len(loader) / dist.get_world_size()
            reached = accuracy(model.module, test_set)
            console.print(f"epoch {epoch + 1:2}  loss {mean:.4f}  test accuracy {reached:.1%}")
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hbm")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    reached = train(args.epochs, console)
    dist.destroy_process_group()
    good = reached >= WANTED_ACCURACY
    console.print(
        "[green]OK:" if good else "[red]FAILED:",
        f"{reached:.1%} of the test images recognised ({WANTED_ACCURACY:.0%} wanted)",
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
