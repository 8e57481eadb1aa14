"""A rank of a parameter server. Rank 0 has the weights; the other ranks are workers.

The workers' steps only communicate.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import torch_hbmcomm as hbmcomm
from papers.layer_drop.resnet50 import resnet50
from papers.layer_drop.synthetic import Synthetic
from torch_hbmcomm import smb
from torch_hbmcomm.bench.peer import obey

SERVER = 0
_RATE = 1e-6  # learning rate: the weights hardly change


class Clock:
    """Times of consecutive laps.

    times: for each lap, its seconds, and the seconds in which this thread ran on a core.
    """

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self._last = time.perf_counter(), time.thread_time()

    def lap(self) -> None:
        now = time.perf_counter(), time.thread_time()
        self.times.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now


class Member:
    """A rank that has one parameter server at a time, from prepare() or attach() to close()."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._server: hbmcomm.ParameterServer | hbmcomm.SyncParameterServer

    def join(self, store_file: str, world: int, width: int) -> None:
        """Join the process group.

        store_file: path of a new file, equal on all ranks.
        width: channels of ResNet-50's first stage.
        """
        torch.set_num_threads(1)
        dist.init_process_group(
            "hbm", init_method=f"file://{store_file}", rank=self._rank, world_size=world
        )
        self._model = Synthetic(resnet50(width), self._rank)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=_RATE, momentum=0.9)

    def prepare(self, terms: dict[str, Any] | None) -> None:
        """Form a SyncParameterServer, on all ranks. terms: LayerDrop's arguments; None: no drop."""
        self._server = hbmcomm.SyncParameterServer(
            self._model,
            self._optimizer,
            server=SERVER,
            dedicated=True,
            buffers="local",
            drop=_drop(terms),
        )

    def attach(
        self, url: str, token: str, workers: int, transfer: str | None, terms: dict[str, Any] | None
    ) -> None:
        """Form a ParameterServer over tcp, on the workers."""
        self._server = hbmcomm.ParameterServer(
            self._model,
            self._optimizer,
            box=smb.connect(url, token, "tcp"),
            buffers="local",
            transfer=None if transfer is None else getattr(torch, transfer),
            workers=workers,
            drop=_drop(terms),
        )

    def serve(self) -> list[tuple[float, float]]:
        """Serve, on rank 0, until all workers have closed. Returns the times of each update."""
        clock = Clock()
        assert isinstance(self._server, hbmcomm.SyncParameterServer)
        self._server.serve(after_update=clock.lap)
        return clock.times

    def run(self, steps: int) -> list[tuple[float, float]]:
        """Take steps, on a worker. Returns the times of each step."""
        clock = Clock()
        for _ in range(steps):
            self._model().backward()
            self._server.step()
            clock.lap()
        return clock.times

    def size(self) -> int:
        """Return the bytes of all weights."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def close(self) -> None:
        """Close, on the workers."""
        self._server.close()


def _drop(terms: dict[str, Any] | None) -> hbmcomm.LayerDrop | None:
    return None if terms is None else hbmcomm.LayerDrop(**terms)


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Member(rank), rank)
