"""A training that resumes from its checkpoint, as a script under torchrun.

    recovering.py FOLDER STEPS VICTIM

In each step, every rank adds 1 to a weight. This 1 is the sum of all ranks' gradients, divided by
the known value of this sum. Rank 0 saves the weight. In the first attempt, the rank VICTIM, if
there is one, is killed after half of the steps. The last line of each rank is "rank R of N: weight
W after STEPS steps, from step S". Each process leaves a file whose name has its id and its node.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PAUSE = 0.05  # seconds, in each step


def main(folder: Path, steps: int, victim: int) -> None:
    dist.init_process_group("hbm", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    saved = folder / "checkpoint"
    node = os.environ.get("HBMCOMM_NODE_ID", "")
    (folder / f"pid{os.getpid()}-{node}").touch()
    first, weight = torch.load(saved) if saved.exists() else (0, torch.zeros(1000))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(first, steps):
        if rank == victim and attempt == 0 and step == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = torch.full((1000,), 2.0 * rank)
        dist.all_reduce(gradient)
        weight += gradient / (size * (size - 1))  # 1, for any number of ranks
        if rank == 0:
            torch.save((step + 1, weight), folder / "half")
            os.replace(folder / "half", saved)
            (folder / f"began{attempt}-{size}").touch()
        dist.barrier()
        time.sleep(PAUSE)
    line = f"rank {rank} of {size}: weight {weight[0]:.0f} after {steps} steps, from step {first}"
    sys.stdout.write(line + "\n")  # in one write: the ranks share the output
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
