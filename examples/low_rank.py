"""Train the network of ddp_digits.py, and send a tenth of its gradients' bytes.

Each step sends a low-rank approximation of each layer's gradient. Each rank keeps the remainder for
later steps (error feedback). The training then runs again and sends everything, for comparison.

    torchrun --standalone --nproc-per-node 2 examples/low_rank.py

The first training must reach the accuracy of the second, less one percentage point. It must not
send more than the requested share of the bytes plus 0.02. Otherwise the program exits non-zero.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ddp_digits import BATCH, SEED, accuracy, digits, network
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

import torch_hbmcomm as hbmcomm

RATE = 5e-3
LOST = 0.01  # most loss of accuracy
OVER = 0.02  # largest excess of the share of bytes sent over the requested share


@dataclass
class Run:
    ratio: float
    accuracy: float
    sent: float  # bytes that each rank sent
    of: float  # bytes of all gradients of a rank
    layers: float  # share of the layers that the last step sent whole
    oldest: float  # steps that the oldest remainder has waited


def train(ratio: float, epochs: int, console: Console) -> Run:
    train_set, test_set = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = OneCycleLR(optimizer, max_lr=RATE, total_steps=epochs * len(loader))
    state = hbmcomm.LowRankState(model, hbmcomm.LowRank(ratio=ratio))
    model.register_comm_hook(state, hbmcomm.low_rank_hook)
    what = f"sending {1 - ratio:.0%}"
    for epoch in track(range(epochs), what, console=console):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    found = state.summary()
    return Run(
        ratio,
        accuracy(model.module, test_set),
        found["sent_bytes"],
        found["gradient_bytes"],
        found["sent_layers"] / found["layers"],
        found["oldest_age"],
    )


def report(runs: list[Run], console: Console) -> bool:
    table = Table("ratio", title="\nHandwritten digits", title_justify="left")
    for heading in ("test accuracy", "sent by each rank", "of all", "sent whole in the last step"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(f"{run.ratio:.0%}", f"{run.accuracy:.1%}", f"{run.sent / 1e6:.1f} MB",
                      f"{run.sent / run.of:.1%}", f"{run.layers:.0%}")  # fmt: skip
    console.print(table)
    compressed, whole = runs
    share = compressed.sent / compressed.of
    lost = whole.accuracy - compressed.accuracy
    good = lost <= LOST and share <= 1 - compressed.ratio + OVER
    console.print(
        "[green]OK:" if good else "[red]FAILED:",
        f"{share:.1%} of the bytes were sent ({1 - compressed.ratio:.0%} requested), and the "
        f"accuracy is {compressed.accuracy:.1%} instead of {whole.accuracy:.1%}",
        soft_wrap=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hbm")
    parser.add_argument("--epochs", type=int, default=12,
                        help="the first steps send about twice as much")  # fmt: skip
    parser.add_argument("--ratio", type=float, default=0.9)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    runs = [train(ratio, args.epochs, console) for ratio in (args.ratio, 0.0)]
    dist.destroy_process_group()
    return 0 if report(runs, console) else 1


if __name__ == "__main__":
    sys.exit(main())
