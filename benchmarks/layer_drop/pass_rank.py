"""A process that makes the pass over memory, and iterations of ResNet-50."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from benchmarks.layer_drop.resnet50 import resnet50
from torch_hbmcomm import native
from torch_hbmcomm.bench.peer import obey
from torch_hbmcomm.bench.rounds import Timed, timed

BATCH = 8


class Passes:
    def prepare(self, width: int, threads: int) -> int:
        """Make the memory. Returns the bytes that a pass moves: two streams are read and one is
        written."""
        torch.set_num_threads(threads)
        sizes = [parameter.numel() for parameter in resnet50(width).parameters()]
        gradients = [torch.full((size,), 1e-3) for size in sizes]
        caches = [torch.zeros(size) for size in sizes]
        accumulate = native.load().layerdrop_accumulate
        gradient, cache = torch.full((sum(sizes),), 1e-3), torch.zeros(sum(sizes))
        self._calls: dict[str, Timed] = {
            "accumulate": timed(lambda: accumulate(gradients, caches, caches, 1.0, False)),
            "torch.add": timed(lambda: torch.add(cache, gradient, alpha=1.0, out=cache)),
        }
        return 3 * 4 * sum(sizes)

    def run(self, what: str, samples: int, calls: int) -> list[float]:
        """Return the microseconds of a pass, for each sample, as rounds.Timed does."""
        return list(self._calls[what](samples, calls))

    def iterations(self, width: int, side: int, threads: int, count: int) -> list[float]:
        """Return the seconds of forward and backward passes."""
        torch.set_num_threads(threads)
        model = resnet50(width)
        images = torch.randn(BATCH, 3, side, side)
        labels = torch.arange(BATCH)

        def step() -> None:
            model.zero_grad()
            cross_entropy(model(images), labels).backward()

        return [microseconds / 1e6 for microseconds in timed(step)(count, 1)]


if __name__ == "__main__":
    obey(Passes())
