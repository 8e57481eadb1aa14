"""Train the network of ddp_digits.py with a parameter server, so that no worker waits for another.

The weights are in a memory box. In each step a worker takes the next unused batch, and computes the
delta of its optimizer's step. It adds the delta to the weights in the box, and continues with the
sum. The training ends after the last batch. A table shows the progress of each worker.

    torchrun --standalone --nproc-per-node 4 examples/async_parameter_server.py

With `--slow 3`, rank 3 sleeps in every step, and the other ranks take the batches that it leaves.
With `--staleness 4` as well, a rank that is 4 steps ahead of rank 3 waits for it.

Workers can also be plain processes. Any of them may start late or be killed:

    hbmcomm serve --listen 127.0.0.1:7777 &
    python examples/async_parameter_server.py --box smb://127.0.0.1:7777 &
    python examples/async_parameter_server.py --box smb://127.0.0.1:7777

Exits non-zero when the accuracy of the shared weights is below 97 %.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from ddp_digits import BATCH, WANTED_ACCURACY, accuracy, digits, network
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import torch_hbmcomm as hbmcomm

RATE = 5e-3
NAP = 0.05  # seconds that a slow worker sleeps in a step
MOST_WORKERS = 64
LINE = np.dtype([("steps", "f8"), ("ahead", "f8"), ("mb_s", "f8"), ("seconds", "f8")])


class Board:
    """The workers' shared state: one line of numbers per worker, and counters of batches and lines.

    The state is in temporary segments: the box deletes them when the last worker has ended.
    """

    def __init__(self, box: hbmcomm.smb.Box, batches: int, line: int | None) -> None:
        """Take the line with the index `line`, or the next free line if `line` is None."""
        self._lines = box.alloc(MOST_WORKERS * LINE.itemsize, "digits/lines", temporary=True)
        self._taken = box.alloc(16, "digits/taken", temporary=True)
        self._line = self._taken.fetch_add(8, 1) if line is None else line
        self.batches = batches

    def take(self) -> int:
        """Return the number of the next unused batch."""
        return self._taken.fetch_add(0, 1)

    def write(self, *line: float) -> None:
        offset = self._line * LINE.itemsize
        self._lines.write(offset, source=np.array([line], LINE).view(np.uint8))

    def table(self) -> Table:
        lines = np.zeros(MOST_WORKERS, LINE)
        self._lines.read(into=lines.view(np.uint8))
        table = Table("worker", "share", title="\nHandwritten digits", title_justify="left")
        for heading in ("steps", "ahead", "MB/s", "time"):
            table.add_column(heading, justify="right")
        for worker, line in enumerate(lines):
            if line["steps"] > 0:
                bar = ProgressBar(self.batches, line["steps"], width=30)
                table.add_row(f"{worker}", bar, f"{line['steps']:.0f}", f"{line['ahead']:.0f}",
                              f"{line['mb_s']:.0f}", f"{line['seconds']:.1f} s")  # fmt: skip
        return table


def batches(data: TensorDataset, board: Board) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield the progress (0 to 1), images and labels of each batch that this worker takes."""
    images, labels = data.tensors
    in_epoch = len(labels) // BATCH
    while (number := board.take()) < board.batches:
        epoch, at = divmod(number, in_epoch)
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        chosen = shuffled[at * BATCH : (at + 1) * BATCH]
        yield number / board.batches, images[chosen], labels[chosen]


def train(ps: hbmcomm.ParameterServer, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
          data: TensorDataset, nap: float, board: Board) -> None:  # fmt: skip
    start = time.perf_counter()
    for progress, images, labels in batches(data, board):
        for group in optimizer.param_groups:
            group["lr"] = RATE * math.sin(math.pi * progress)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        time.sleep(nap)
        ps.step()  # instead of optimizer.step()

        seconds = time.perf_counter() - start
        stats = ps.stats()
        megabytes = (stats["pushed_bytes"] + stats["pulled_bytes"]) / 1e6
        board.write(stats["steps"], stats["ahead"], megabytes / seconds, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--box", help="address of a running box; no process group then")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--staleness", type=int, help="most steps ahead of the slowest worker")
    parser.add_argument("--rule", default="downpour", choices=("downpour", "easgd"))
    parser.add_argument(
        "--slow", type=int, default=-1, metavar="RANK", help="rank that sleeps in every step"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    rank = None
    if args.box is None:
        options = hbmcomm.Options(parameter_server="auto")
        dist.init_process_group("hbm", pg_options=options)
        rank = dist.get_rank()
    box = hbmcomm.smb.of() if args.box is None else hbmcomm.smb.connect(args.box)
    train_set, test_set = digits()
    board = Board(box, args.epochs * (len(train_set) // BATCH), rank)

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    console = Console(quiet=bool(rank), highlight=False)
    with (
        Live(get_renderable=board.table, console=console, auto_refresh=not rank),
        hbmcomm.ParameterServer(
            model,
            optimizer,
            box=None if args.box is None else box,  # None: the box of the process group
            staleness=args.staleness,
            rule=args.rule,
        ) as ps,
    ):
        train(ps, model, optimizer, train_set, NAP if rank == args.slow else 0, board)
        ps.finish(wait=True)  # all other workers have finished too, or have died
        ps.pull()
    found = accuracy(model, test_set)
    if args.box is None:
        dist.destroy_process_group()

    good = found >= WANTED_ACCURACY
    console.print("\n[green]OK:" if good else "\n[red]FAILED:", f"{found:.1%} of the test images "
                  f"recognised ({WANTED_ACCURACY:.0%} wanted)", soft_wrap=True)  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
