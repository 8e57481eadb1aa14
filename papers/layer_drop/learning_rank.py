"""A rank that learns one of the tasks. Several ranks may share a host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import torch_hbmcomm as hbmcomm
from papers.layer_drop.learning import Learned, learn
from papers.layer_drop.tasks import TASKS
from torch_hbmcomm.bench.peer import obey


class Learner:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        warnings.simplefilter("ignore", FutureWarning)  # DDP warns of its own arguments

    def join(self, store_file: str, world: int, task: str, box: bool = False) -> None:
        """Join the process group. store_file: path of a new file, equal on all ranks.

        box: True: the group has a memory box
        """
        torch.set_num_threads(1)
        dist.init_process_group(
            "hbm",
            init_method=f"file://{store_file}",
            rank=self._rank,
            world_size=world,
            pg_options=hbmcomm.Options(parameter_server="auto") if box else None,
        )
        self._task = TASKS[task]()

    def begin(self, **terms: Any) -> None:
        """Begin to learn. terms: arguments of learn()."""
        self._training: Iterator[Learned] = learn(self._task, **terms)

    def look(self) -> dict[str, Any]:
        """Train until the next evaluation, and return the item of learn()."""
        return asdict(next(self._training))


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Learner(rank), rank)
