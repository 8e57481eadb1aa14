"""Measures of a bucket that ranks exchange, so that all ranks decide the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SKETCHED = 4
"""The count of numbers in a sketch. More numbers estimate the gradient's size with a smaller random
error."""

_MOST = 1e32
"""The largest finite number that is exchanged: the sum over a million ranks is still finite."""


@dataclass(frozen=True)
class Measures:
    """Numbers for each parameter of a bucket.

    residual_sums: L1 sums of the residuals, with this step's gradients.
    gradients: L1 sums of this step's gradients.
    energies: the squared norms of the last columns of R; 0 for a vector, or before there is an R.
    sketches: SKETCHED random products of each gradient that is a matrix; empty for the others.
    """

    residual_sums: Sequence[float]
    gradients: Sequence[float]
    energies: Sequence[float]
    sketches: Sequence[Sequence[float]]

    def pack(self) -> torch.Tensor:
        """Return the numbers as a flat float32 tensor.

        It packs energies and sketches of matrices only, because each packed number takes a part of
        the budget. Clamps finite numbers to _MOST, so that their sum over the ranks is finite.
        """
        numbers = [*self.residual_sums, *self.gradients]
        for energy, sketch in zip(self.energies, self.sketches, strict=True):
            if sketch:
                numbers += [energy, *sketch]
        exact = torch.tensor(numbers, dtype=torch.float64)
        return torch.where(exact.isfinite(), exact.clamp(-_MOST, _MOST), exact).float()

    def unpack(self, packed: torch.Tensor) -> Measures:
        """Return the measures in `packed`. packed: from a pack() for the same parameters"""
        numbers = iter(packed.tolist())
        residual_sums = [next(numbers) for _ in self.residual_sums]
        gradients = [next(numbers) for _ in self.gradients]
        energies: list[float] = []
        sketches: list[list[float]] = []
        for own in self.sketches:
            energies.append(next(numbers) if own else 0.0)
            sketches.append([next(numbers) for _ in own])
        return Measures(residual_sums, gradients, energies, sketches)
