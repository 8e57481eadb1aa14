"""Train the network of ddp_digits.py on workers that meet once in many steps.

Each worker trains by itself. At a meeting the workers average the changes of their weights. Between
two meetings nothing is sent.

    torchrun --standalone --nproc-per-node 2 examples/outer_steps.py

Exits non-zero when the test accuracy is below 97 %, or when a worker sent more than its meetings
and three models.
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from ddp_digits import BATCH, SEED, WANTED_ACCURACY, accuracy, digits, network
from rich.console import Console
from rich.progress import track
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

import torch_hbmcomm as hbmcomm

RATE = 5e-3


def train(epochs: int, every: int, console: Console) -> tuple[float, float, int]:
    """Return the accuracy on the test images, the share of DDP's bytes that were sent, and the
    number of steps."""
    train_set, test_set = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = OneCycleLR(optimizer, max_lr=RATE, total_steps=epochs * len(loader))
    outer = hbmcomm.OuterSteps(model, optimizer, every=every)  # instead of DDP
    for epoch in track(range(epochs), "training", console=console):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
            outer.step()  # meets the other workers if it is time
    outer.close()  # gives the last steps: now all workers have the same network
    found = outer.stats()
    of_ddp = found["steps"] * sum(one.nbytes for one in model.parameters())
    return accuracy(model, test_set), found["sent_bytes"] / of_ddp, found["steps"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hbm")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--every", type=int, default=20, help="steps between two meetings")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    reached, share, steps = train(args.epochs, args.every, console)
    dist.destroy_process_group()
    good = reached >= WANTED_ACCURACY and share <= 1 / args.every + 3 / steps
    console.print(
        "[green]OK:" if good else "[red]FAILED:",
        f"{reached:.1%} of the test images recognised, with {share:.1%} of the bytes of DDP",
        soft_wrap=True,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
