"""A process that times the search for a threshold, and the comparison with the threshold.

Both are of ResNet-50's gradients: by one value of each layer, or by every gradient.
"""

from __future__ import annotations

import math

import torch

from papers.layer_drop.resnet50 import resnet50
from papers.layer_drop.synthetic import Synthetic
from torch_hbmcomm import native
from torch_hbmcomm.bench.peer import obey
from torch_hbmcomm.bench.rounds import Timed, timed
from torch_hbmcomm.error_feedback.passes import sums_of

L1, L2 = "L1 norm of each layer", "L2 norm of each layer"
ALL_BY_NUMPY = "all gradients, NumPy's partition"
ALL_BY_PYTORCH = "all gradients, PyTorch's kthvalue"
SEARCHES = (L1, L2, ALL_BY_NUMPY, ALL_BY_PYTORCH)
LAYERS, LAYERS_BY_PYTORCH = "one value of each layer", "one value of each layer, PyTorch's norm"
EVERY, SELECTED = "every gradient", "every gradient, with a selection"
COMPARISONS = (LAYERS, LAYERS_BY_PYTORCH, EVERY, SELECTED)


class Thresholds:
    def prepare(self, width: int, threads: int, ratio: float) -> None:
        """Make the gradients of a step. ratio: the share of them that the thresholds shall drop."""
        torch.set_num_threads(threads)
        model = Synthetic(resnet50(width), rank=0)
        model().backward()
        self._gradients = [one.grad.view(-1) for one in model.parameters() if one.grad is not None]
        self._sizes = [gradient.numel() for gradient in self._gradients]
        self._ratio = ratio
        self._magnitudes = torch.empty(sum(self._sizes))
        self._above = torch.empty(max(self._sizes), dtype=torch.bool)
        self.of_layers, self.of_all = self.search_layers(), self.search_all()
        self._calls: dict[str, Timed] = {
            L1: timed(self.search_layers),
            L2: timed(lambda: self.search_layers(squares=True)),
            ALL_BY_NUMPY: timed(self.search_all),
            ALL_BY_PYTORCH: timed(self.search_all_by_pytorch),
            LAYERS: timed(self.compare_layers),
            LAYERS_BY_PYTORCH: timed(self.compare_layers_by_pytorch),
            EVERY: timed(self.compare_all),
            SELECTED: timed(lambda: self.compare_all(select=True)),
        }

    def run(self, what: str, samples: int, calls: int) -> list[float]:
        """Return the microseconds of a call, for each sample, as rounds.Timed does."""
        return list(self._calls[what](samples, calls))

    def search_layers(self, squares: bool = False) -> float:
        """Return LayerDrop's threshold for L1 norms, or L2 norms if `squares`."""
        norms = sums_of(self._gradients, squares)
        if squares:
            norms = list(map(math.sqrt, norms))
        found: float = native.load().layerdrop_threshold(norms, self._sizes, self._ratio)
        return found

    def search_all(self) -> float:
        """Return the magnitude that the part `ratio` of all gradients does not reach."""
        values = self._fill().numpy()
        values.partition(self._place)
        return float(values[self._place])

    def search_all_by_pytorch(self) -> float:
        return float(self._fill().kthvalue(self._place + 1).values)

    def compare_layers(self) -> list[bool]:
        """Return True for each layer that is sent."""
        return [norm >= self.of_layers for norm in sums_of(self._gradients)]

    def compare_layers_by_pytorch(self) -> list[bool]:
        norms = torch.stack([torch.linalg.vector_norm(one, 1) for one in self._gradients])
        return [norm >= self.of_layers for norm in norms.tolist()]

    def compare_all(self, select: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compare every gradient. If `select`, return the values and places that are sent, by
        layer."""
        selected = []
        for gradient in self._gradients:
            size = gradient.numel()
            magnitudes, above = self._magnitudes[:size], self._above[:size]
            torch.abs(gradient, out=magnitudes)
            torch.ge(magnitudes, self.of_all, out=above)
            if select:
                selected.append((gradient.masked_select(above), above.nonzero()))
        return selected

    @property
    def _place(self) -> int:
        """The place of the threshold among the magnitudes in ascending order."""
        return int(self._ratio * len(self._magnitudes))

    def _fill(self) -> torch.Tensor:
        """Return the magnitudes of all gradients, in the order of the layers."""
        parts = self._magnitudes.split(self._sizes)
        for gradient, part in zip(self._gradients, parts, strict=True):
            torch.abs(gradient, out=part)
        return self._magnitudes


if __name__ == "__main__":
    obey(Thresholds())
