"""A worker of benchmarks.box.boxes. Its steps only exchange with the boxes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb
from torch_hbmcomm.bench.peer import obey

_RATE = 1e-6  # learning rate: the weights hardly change


class _Model(nn.Module):
    """A parameter of `count` elements of float32, with a gradient that stays."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(count))
        self.weights.grad = torch.randn(count)


class Worker:
    """A process that has one ParameterServer at a time, from join() to leave()."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._joined = ExitStack()

    def join(self, urls: list[str], token: str, name: str, workers: int, size: int) -> None:
        """Join the job `name`, and wait for its workers. size: bytes of the model."""
        model = _Model(size // 4)
        boxes = [self._joined.enter_context(smb.connect(url, token, "tcp")) for url in urls]
        self._server = self._joined.enter_context(
            hbmcomm.ParameterServer(
                model,
                torch.optim.SGD(model.parameters(), lr=_RATE),
                box=boxes,
                name=name,
                workers=workers,
                overlap=False,  # a step takes as long as its exchange
            )
        )

    def run(self, seconds: float) -> dict[str, Any]:
        """Exchange until `seconds` have passed, and at least twice.

        Returns the "seconds" of each exchange except the first, and the bytes "pushed" and "pulled"
        in an exchange.
        """
        before, end = self._server.stats(), time.monotonic() + seconds
        times: list[float] = []
        while len(times) < 2 or time.monotonic() < end:
            begin = time.perf_counter()
            self._server.step()
            times.append(time.perf_counter() - begin)
        after = self._server.stats()
        pushed, pulled = (
            (after[f"{way}_bytes"] - before[f"{way}_bytes"]) / len(times)
            for way in ("pushed", "pulled")
        )
        return {"seconds": times[1:], "pushed": pushed, "pulled": pulled}

    def leave(self) -> None:
        self._joined.close()


if __name__ == "__main__":
    obey(Worker())
