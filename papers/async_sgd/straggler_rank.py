"""A worker that trains at a given pace, over a box or under DistributedDataParallel."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb
from torch_hbmcomm.bench.peer import obey

_WIDTH = 1024  # the layer's weights take 4 MiB
_WARM = 3  # uncounted steps


class Trainee:
    """A worker that takes steps on command, and answers with the seconds of a step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        _model()  # the first optimizer imports many modules: do so before the training

    def join(self, store_file: str, world: int) -> None:
        """Join the process group. store_file: path of a new file, equal on all ranks."""
        torch.set_num_threads(1)
        dist.init_process_group(
            "hbm", init_method=f"file://{store_file}", rank=self._rank, world_size=world
        )
        self._groups = {world: dist.group.WORLD, world - 1: dist.new_group(range(world - 1))}

    def parameter_server(
        self, url: str, token: str, transport: Any, name: str, workers: int, compute: float,
        steps: int,
    ) -> float:  # fmt: skip
        """Train over a box.

        workers: number of workers, which wait for one another before the first step.
        compute: seconds of sleep in a step.
        """
        model, optimizer = _model()
        with (
            smb.connect(url, token, transport) as box,
            hbmcomm.ParameterServer(model, optimizer, box=box, name=name, workers=workers) as ps,
        ):
            return _train(model, ps.step, compute, steps)

    def ddp(self, workers: int, compute: float, steps: int) -> float:
        """Train under DistributedDataParallel in the group of the first ranks."""
        model, optimizer = _model()
        replica = DistributedDataParallel(model, process_group=self._groups[workers])
        return _train(replica, optimizer.step, compute, steps)


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(_WIDTH, _WIDTH, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def _train(model: nn.Module, step: Callable[[], Any], compute: float, steps: int) -> float:
    example = torch.ones(1, _WIDTH)
    start = 0.0
    for number in range(_WARM + steps):
        if number == _WARM:
            start = time.perf_counter()
        model.zero_grad()
        time.sleep(compute)
        model(example).sum().backward()
        step()
    return (time.perf_counter() - start) / steps


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Trainee(rank), rank)
