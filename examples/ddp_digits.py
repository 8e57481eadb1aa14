"""Train a small convolutional network on handwritten digits with DistributedDataParallel.

Every rank trains on its own share of 1,437 images of 8 x 8 pixels. DDP averages the gradients over
the process group in each step, so all ranks hold the same network. The training runs again over
Gloo. The same seed must give the same losses, and a table compares the times.

    torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py

Exits non-zero when the test accuracy is below 97 % or when the two runs disagree.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
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
SAME_LOSS = 1e-5  # largest difference between backends, whose order of addition may differ


@dataclass
class Run:
    """The outcome of one training run. Every field except `seconds` is equal on all ranks."""

    backend: str
    losses: list[float] = field(default_factory=list)  # mean over all ranks, one per epoch
    accuracy: float = 0.0  # on the test images, after the last epoch
    seconds: float = 0.0  # training alone, without the evaluation


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


def train(group: dist.ProcessGroup | None, epochs: int, console: Console) -> Run:
    train_set, test_set = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
    network()(
        train_set.tensors[0][:BATCH]
    ).sum().backward()  # pays first-use costs before the measurement
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = OneCycleLR(optimizer, max_lr=5e-3, total_steps=epochs * len(loader))
    run = Run(dist.get_backend(group))
    console.print(f"\nTraining on {dist.get_world_size(group)} ranks over [bold]{run.backend}")
    with Progress(console=console) as progress:
        bar = progress.add_task(run.backend, total=epochs * len(loader))
        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # another shuffle in every epoch, the same on all ranks
            total = torch.zeros(())
            start = time.perf_counter()
            for images, labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()  # DDP averages the gradients here, while they are computed
                optimizer.step()
                schedule.step()
                total += loss.detach()
                progress.advance(bar)
            dist.all_reduce(total, group=group)
            run.seconds += time.perf_counter() - start
            run.losses.append(total.item() / len(loader) / dist.get_world_size(group))
            run.accuracy = accuracy(model.module, test_set)
            console.print(f"epoch {epoch + 1:2}  loss {run.losses[-1]:.4f}  "
                          f"test accuracy {run.accuracy:.1%}")  # fmt: skip
    return run


def report(runs: list[Run], images: int, console: Console) -> bool:
    """Print the table and the verdict. Return True if the accuracy and the losses are good."""
    table = Table("backend", title="\nHandwritten digits", title_justify="left")
    for heading in ("last loss", "test accuracy", "time", "images/s"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(run.backend, f"{run.losses[-1]:.4f}", f"{run.accuracy:.1%}",
                      f"{run.seconds:.2f} s", f"{images / run.seconds:,.0f}")  # fmt: skip
    console.print(table)

    first, last = runs[0], runs[-1]  # the same run with --no-compare
    difference = max(abs(a - b) for a, b in zip(first.losses, last.losses, strict=True))
    good = min(first.accuracy, last.accuracy) >= WANTED_ACCURACY and difference <= SAME_LOSS
    verdict = f"{first.accuracy:.1%} of the test images recognised ({WANTED_ACCURACY:.0%} wanted)"
    if last is not first:
        verdict += (f"; losses over {first.backend} and {last.backend} agree to {difference:.0e} "
                    f"({SAME_LOSS:.0e} wanted), times {first.seconds:.2f} s and "
                    f"{last.seconds:.2f} s")  # fmt: skip
    console.print("[green]OK:" if good else "[red]FAILED:", verdict, soft_wrap=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hbm")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True,
                        help="train once more over gloo")  # fmt: skip
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    groups = [dist.group.WORLD]
    if args.compare:
        groups.append(dist.new_group(backend="gloo"))
    runs = [train(group, args.epochs, console) for group in groups]
    dist.destroy_process_group()
    good = report(runs, args.epochs * len(digits()[0]), console)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
