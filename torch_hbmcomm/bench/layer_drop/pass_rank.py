"""What the pass over memory costs, and what an iteration of ResNet-50 does."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from torch_hbmcomm import _smb, native
from torch_hbmcomm.bench.box.memory import private
from torch_hbmcomm.bench.layer_drop.resnet50 import resnet50
from torch_hbmcomm.bench.peer import obey

BATCH = 8


class Passes:
    """Of each, run() returns the seconds of so many calls."""

    def prepare(self, width: int, threads: int) -> int:
        """Returns the bytes that a pass moves: two streams are read and one is written."""
        torch.set_num_threads(threads)
        sizes = [parameter.numel() for parameter in resnet50(width).parameters()]
        gradients = [torch.full((size,), 1e-3) for size in sizes]
        caches = [torch.zeros(size) for size in sizes]
        accumulate = native.load().layerdrop_accumulate
        whole = sum(sizes) // 16 * 16  # what the triad takes
        gradient, cache = torch.full((whole,), 1e-3), torch.zeros(whole)
        triad = _smb.BenchTriad(private(4 * whole), private(4 * whole), private(4 * whole), threads)
        self._calls: dict[str, Callable[[int], float]] = {
            "accumulate": _timed(lambda: accumulate(gradients, caches, caches, 1.0, False)),
            "torch.add": _timed(lambda: torch.add(cache, gradient, alpha=1.0, out=cache)),
            "triad": triad.run,
        }
        return 3 * 4 * sum(sizes)

    def run(self, what: str, calls: int) -> float:
        return self._calls[what](calls)

    def iterations(self, width: int, side: int, threads: int, count: int) -> list[float]:
        """The seconds of forward and backward passes."""
        torch.set_num_threads(threads)
        model = resnet50(width)
        images = torch.randn(BATCH, 3, side, side)
        labels = torch.arange(BATCH)

        def step() -> None:
            model.zero_grad()
            cross_entropy(model(images), labels).backward()

        step()
        timed = _timed(step)
        return [timed(1) for _ in range(count)]


def _timed(call: Callable[[], object]) -> Callable[[int], float]:
    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    obey(Passes())
