"""The program that `hbmcomm demo` starts under torchrun.

Each rank trains a convolutional network on its share of 4,096 images of digits, and DDP averages
the gradients. The training runs twice from the same seed, over hbm and over Gloo. Exits with 1 if
the accuracy is too low or the losses of the two trainings differ.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

SEED = 0
IMAGES, TESTS = 4096, 1024
EPOCHS, BATCH = 6, 32  # BATCH: images of all ranks together
SIDE = 16  # of an image, in pixels
NOISE = 0.2  # standard deviation; a segment's brightness is 0.6 to 1
WANTED_ACCURACY = 0.9
# The largest difference of losses between the backends. From 3 ranks on the backends add in another
# order, and training multiplies the rounding errors.
SAME_LOSS, SAME_LOSS_OF_MANY = 1e-5, 0.05

# The segments of a seven-segment display, as rows and columns of a glyph, and the lit segments of
# each digit.
_SEGMENTS = {
    "a": (slice(0, 1), slice(0, 5)),
    "b": (slice(0, 5), slice(4, 5)),
    "c": (slice(4, 9), slice(4, 5)),
    "d": (slice(8, 9), slice(0, 5)),
    "e": (slice(4, 9), slice(0, 1)),
    "f": (slice(0, 5), slice(0, 1)),
    "g": (slice(4, 5), slice(0, 5)),
}
_DIGITS = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg"]


@dataclass
class Run:
    """The outcome of a training. Every field except `seconds` is equal on all ranks."""

    backend: str
    losses: list[float] = field(default_factory=list)  # the mean over all ranks, by epoch
    accuracy: float = 0.0  # on the test images, after the last epoch
    seconds: float = 0.0  # of the training alone, without the evaluation


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return float32 images of shape (count, 1, SIDE, SIDE), and their digits of shape (count,).

    Each image has a digit of a seven-segment display at a random place, in noise.
    """
    random = torch.Generator().manual_seed(seed)
    glyphs = torch.zeros(10, 9, 5)
    for glyph, lit in zip(glyphs, _DIGITS, strict=True):
        for name in lit:
            glyph[_SEGMENTS[name]] = 1
    labels = torch.randint(10, (count,), generator=random)
    rows = torch.randint(SIDE - 9 + 1, (count,), generator=random)
    columns = torch.randint(SIDE - 5 + 1, (count,), generator=random)
    images = torch.randn(count, 1, SIDE, SIDE, generator=random) * NOISE
    brightness = 0.6 + 0.4 * torch.rand(count, generator=random)
    for image, label, row, column, light in zip(
        images, labels, rows.tolist(), columns.tolist(), brightness, strict=True
    ):
        image[0, row : row + 9, column : column + 5] += light * glyphs[label]
    return images, labels


def network() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def shares(epoch: int) -> Iterator[Tensor]:
    """Yield this rank's indices in each batch of an epoch."""
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(BATCH):
        yield batch[dist.get_rank() :: dist.get_world_size()]


def train(group: dist.ProcessGroup | None, console: Console) -> Run:
    images, labels = digits(IMAGES, seed=1)
    test_images, test_labels = digits(TESTS, seed=2)
    model = DistributedDataParallel(network(), process_group=group)
    cross_entropy(model(images[:1]), labels[:1]).backward()  # pays the costs of a first use
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    run = Run(dist.get_backend(group))
    console.print(f"\n{dist.get_world_size(group)} ranks train over [bold]{run.backend}")
    for epoch in range(EPOCHS):
        losses = []
        begin = time.perf_counter()
        for mine in shares(epoch):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine])
            loss.backward()  # DDP averages the gradients here, while they are computed
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean() / dist.get_world_size(group)
        dist.all_reduce(mean, group=group)
        run.seconds += time.perf_counter() - begin
        run.losses.append(mean.item())
        with torch.no_grad():
            right = model.module(test_images).argmax(dim=1) == test_labels
        run.accuracy = right.float().mean().item()
        console.print(f"epoch {epoch + 1}  loss {mean:.4f}  test accuracy {run.accuracy:.1%}")
    return run


def report(runs: list[Run], ranks: int, console: Console) -> bool:
    """Print a table and the verdict. Return True if the accuracy and the losses are good."""
    table = Table("backend", title="\nNoisy digits", title_justify="left")
    for heading in ("last loss", "test accuracy", "time", "images/s"):
        table.add_column(heading, justify="right")
    for run in runs:
        rate = EPOCHS * IMAGES / run.seconds
        table.add_row(run.backend, f"{run.losses[-1]:.4f}", f"{run.accuracy:.1%}",
                      f"{run.seconds:.2f} s", f"{rate:,.0f}")  # fmt: skip
    console.print(table)
    ours, theirs = runs
    difference = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    read = min(run.accuracy for run in runs)
    same = SAME_LOSS if ranks <= 2 else SAME_LOSS_OF_MANY
    good = read >= WANTED_ACCURACY and difference <= same
    console.print(
        "[green]OK:" if good else "[red]FAILED:",
        f"{read:.1%} of the test images read ({WANTED_ACCURACY:.0%} wanted); losses over "
        f"{ours.backend} and {theirs.backend} agree to {difference:.0e} ({same:.0e} wanted)",
        soft_wrap=True,
    )
    return good


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("hbm")
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    runs = [train(group, console) for group in (None, dist.new_group(backend="gloo"))]
    ranks = dist.get_world_size()
    dist.destroy_process_group()
    return 0 if report(runs, ranks, console) else 1


if __name__ == "__main__":
    sys.exit(main())
