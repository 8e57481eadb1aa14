"""A process that times passes over memory (residuals += gradients), and ResNet-50's compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from papers.layer_drop.resnet50 import resnet50
from torch_hbmcomm import native
from torch_hbmcomm.bench.peer import obey
from torch_hbmcomm.bench.rounds import Timed, timed
from torch_hbmcomm.low_rank.products import (
    add_to_matrices,
    find_lefts,
    find_rights,
    set_matrices,
)
from torch_hbmcomm.low_rank.ranks import matrix_of

BATCH = 8
_LARGE = 2048  # rows and columns


class Passes:
    def prepare(self, width: int, threads: int) -> int:
        """Allocate the memory. Return the bytes of a pass: two streams read, one written."""
        torch.set_num_threads(threads)
        sizes = [parameter.numel() for parameter in resnet50(width).parameters()]
        gradients = [torch.full((size,), 1e-3) for size in sizes]
        caches = [torch.zeros(size) for size in sizes]
        accumulate = native.load().error_feedback_accumulate
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

    def products(
        self, width: int, threads: int, ranks: Mapping[str, int], count: int
    ) -> dict[str, Any]:
        """Time only the four matrix products of a step of the low-rank hook, with its functions.

        ranks: the rank of each matrix's approximation, by the parameter's name.

        For a matrix M with the factors L and R, the products are M R, Lᵀ M, M - L Rᵀ and L Rᵀ.
        Returns their `seconds`, and the number of `operations`: multiplications and additions.
        """
        torch.set_num_threads(threads)
        shapes = {name: one.shape for name, one in resnet50(width).named_parameters()}
        made = (matrix_of(name, shape, 4) for name, shape in shapes.items())
        matrices = [matrix for matrix in made if matrix is not None and ranks[matrix.name]]
        values = [torch.randn(matrix.rows, matrix.columns) for matrix in matrices]
        found = [torch.empty_like(one) for one in values]
        lefts = [torch.randn(matrix.rows, ranks[matrix.name]) for matrix in matrices]
        rights = [torch.randn(ranks[matrix.name], matrix.columns) for matrix in matrices]
        others = [torch.empty_like(one) for one in lefts], [torch.empty_like(one) for one in rights]

        def step() -> None:
            find_lefts(values, others[0], rights, 1.0)
            find_rights(values, lefts, others[1], 1.0)
            add_to_matrices(values, lefts, rights, -1e-6)
            set_matrices(found, lefts, rights)

        step()
        of_one = sum(one.rows * one.columns * ranks[one.name] for one in matrices)
        seconds = [microseconds / 1e6 for microseconds in timed(step)(count, 1)]
        return {"seconds": seconds, "operations": 4 * 2 * of_one}

    def pace(self, threads: int, count: int) -> list[float]:
        """Return the operations per second of a large matrix product by oneDNN."""
        torch.set_num_threads(threads)
        one, other = torch.randn(2, _LARGE, _LARGE).unbind()
        given = one.to_mkldnn(), other.to_mkldnn()
        product = timed(lambda: linear(*given))
        product(1, 1)
        return [2 * _LARGE**3 / microseconds * 1e6 for microseconds in product(count, 1)]


if __name__ == "__main__":
    obey(Passes())
