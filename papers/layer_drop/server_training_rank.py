"""A rank of a parameter server that learns images. Rank 0 has the weights; the others train."""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import torch_hbmcomm as hbmcomm
from papers.layer_drop.learning import OPTIMIZERS, schedule
from papers.layer_drop.tasks import WideConvolutions
from torch_hbmcomm.bench.peer import obey

SERVER = 0


class Learner:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def join(self, store_file: str, world: int) -> None:
        """Join the process group. store_file: path of a new file, equal on all ranks."""
        torch.set_num_threads(1)
        dist.init_process_group(
            "hbm", init_method=f"file://{store_file}", rank=self._rank, world_size=world
        )
        self._workers = world - 1
        self._task = WideConvolutions()

    def prepare(
        self,
        optimizer: str,
        terms: dict[str, Any] | None,
        seed: int,
        steps: int,
        residuals: bool = True,
    ) -> None:
        """Form the parameter server, on all ranks.

        Args:
            terms: arguments of LayerDrop; None: no drop
            residuals: False: workers throw the gradients of dropped layers away
        """
        torch.manual_seed(seed)
        self._draw = torch.Generator().manual_seed(seed)
        self._model = self._task.model()
        steps_it = OPTIMIZERS[optimizer](self._model.parameters(), self._task.rates[optimizer])
        self._schedule = LambdaLR(steps_it, partial(schedule, steps=steps))
        self._server = hbmcomm.SyncParameterServer(
            self._model,
            steps_it,
            server=SERVER,
            dedicated=True,
            drop=None if terms is None else hbmcomm.LayerDrop(**terms),
        )
        self._keeps_residuals = residuals

    def serve(self) -> None:
        """Serve, on rank 0, until all workers have closed."""
        self._server.serve(after_update=self._schedule.step)

    def learn(self, steps: int) -> tuple[float, float]:
        """Take steps, on a worker. Returns the seconds of all steps together, and the mean loss."""
        losses = []
        start = time.perf_counter()
        for _ in range(steps):
            inputs, targets = self._task.examples(self._workers * self._task.batch, self._draw)
            mine = self._rank - 1
            some = inputs.chunk(self._workers)[mine], targets.chunk(self._workers)[mine]
            self._model.zero_grad()
            loss = self._task.loss(self._model(some[0]), some[1])
            loss.backward()
            self._server.step()
            if not self._keeps_residuals:
                self._forget()
            losses.append(float(loss.detach()))
        return time.perf_counter() - start, statistics.fmean(losses)

    def _forget(self) -> None:
        """Throw the residuals away, and keep the threshold. The library has no option for this."""
        dropping = self._server._dropping
        assert dropping is not None
        dropping.prepare(dropping.state_dict() | {"caches": {}})()

    def accuracy(self) -> float:
        """Return the worker's accuracy in % on test images. Its model equals the server's."""
        return self._task.quality(self._model)

    def close(self) -> None:
        """Close, on the workers."""
        self._server.close()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Learner(rank), rank)
