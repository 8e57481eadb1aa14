"""A training that resumes from its checkpoint, as a script under torchrun.

    recovering.py FOLDER STEPS KILLS

In each step the ranks add up data that every rank can compute, and compare the sums with their own.
A sum divided by its reference is 1, and is added to a weight. Rank 0 then saves the checkpoint: the
weight, and the number of ranks of each step so far. The training ends after STEPS steps, or earlier
if FOLDER has a file "enough".

KILLS has pairs STEP:RANK, separated by commas. The rank kills itself before it begins the step,
once.

The last line of each rank is "rank R of N: weight W after S steps, from step F". If a sum is wrong,
the rank leaves a file wrong* before it fails, because torchrun would restart it. Each process
leaves a file pid*, named after its id and HBMCOMM_NODE_ID.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

COUNTS = (8, 200_000)  # elements of the sums


def values(step: int, rank: int, count: int) -> torch.Tensor:
    """Return integers from 1, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(1, 100, (count,), generator=generator, dtype=torch.float32)


def add_up(folder: Path, step: int, rank: int, size: int) -> torch.Tensor:
    """Return the sum over the ranks divided by its reference, for the first elements."""
    for count in COUNTS:
        total = values(step, rank, count)
        dist.all_reduce(total)
        reference = torch.stack([values(step, other, count) for other in range(size)]).sum(0)
        if not torch.equal(total, reference):
            text = f"rank {rank} of {size}, step {step}: {total} is not {reference}"
            (folder / f"wrong{os.getpid()}").write_text(text)
            raise AssertionError(text)
    return total[:1000] / reference[:1000]


def die_if_due(folder: Path, kills: str, step: int, rank: int) -> None:
    if f"{step}:{rank}" in kills.split(","):
        with suppress(FileExistsError):
            (folder / f"killed{step}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, steps: int, kills: str) -> None:
    (folder / f"pid{os.getpid()}-{os.environ.get('HBMCOMM_NODE_ID', '')}").touch()
    dist.init_process_group("hbm", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    saved = folder / "checkpoint"
    sizes: list[int] = []
    weight = torch.zeros(1000)
    if saved.exists():
        weight, sizes = torch.load(saved)
    first = len(sizes)
    while len(sizes) < steps:
        die_if_due(folder, kills, len(sizes), rank)
        weight += add_up(folder, len(sizes), rank, size)
        sizes.append(size)
        enough = torch.tensor([(folder / "enough").exists()])
        if rank == 0:
            torch.save((weight, sizes), folder / "half")
            os.replace(folder / "half", saved)
        dist.broadcast(enough, 0)  # all ranks wait for the checkpoint
        if enough:
            break
    line = f"rank {rank} of {size}: weight {weight.unique().item():.0f} after {len(sizes)} steps"
    sys.stdout.write(f"{line}, from step {first}\n")  # in one write: the ranks share the output
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
