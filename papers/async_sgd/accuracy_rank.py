"""A worker that learns handwritten digits."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import torch_hbmcomm as hbmcomm
from papers.digits import Digits
from torch_hbmcomm.bench.peer import obey

_BATCH = 16  # of one worker
_RATE = 5e-3


class Learner:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        torch.optim.Adam(
            _network().parameters()
        )  # the first optimizer imports many modules: do so before the training

    def join(self, store_file: str, world: int) -> None:
        """Join the process group. store_file: path of a new file, equal on all ranks."""
        torch.set_num_threads(1)
        dist.init_process_group(
            "hbm",
            init_method=f"file://{store_file}",
            rank=self._rank,
            world_size=world,
            pg_options=hbmcomm.Options(parameter_server="auto"),
        )
        self._digits = Digits(self._rank, world, _BATCH)

    def start(self, options: dict[str, Any] | None, epochs: int, seed: int) -> None:
        """Make a model, and prepare its training for `epochs` epochs.

        options: arguments of a parameter server ("kind": the class, unless it is ParameterServer;
            "drop": arguments of LayerDrop); None: DistributedDataParallel
        """
        torch.manual_seed(seed)
        self._shuffling = torch.Generator().manual_seed(seed)
        self._model = _network()
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=_RATE)
        self._schedule = OneCycleLR(self._optimizer, _RATE, total_steps=epochs * self._digits.steps)
        self._server: hbmcomm.ParameterServer | hbmcomm.SyncParameterServer | None = None
        self._replica = self._model
        if options is None:
            self._replica = DistributedDataParallel(self._model)
        else:
            options = {"kind": "ParameterServer", **options}
            if "drop" in options:
                options["drop"] = hbmcomm.LayerDrop(**options["drop"])
            kind = getattr(hbmcomm, options.pop("kind"))
            self._server = kind(self._model, self._optimizer, **options)

    def epoch(self) -> None:
        for images, labels in self._digits.batches(self._shuffling):
            self._optimizer.zero_grad()
            cross_entropy(self._replica(images), labels).backward()
            (self._server or self._optimizer).step()
            self._schedule.step()

    def finish(self) -> float:
        """End the training. Return the percentage of the test images that the model recognises."""
        if self._server is not None:
            self._server.pull()
            dist.barrier()  # after it, all workers have sent their changes
            self._server.pull()
            self._server.close()
        return self._digits.accuracy(self._model)


def _network() -> nn.Module:
    """Make the same network as examples/ddp_digits.py, which has its own copy."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 2 * 2, 10),
    )  # fmt: skip


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Learner(rank), rank)
