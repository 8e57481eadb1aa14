"""Measures of a bucket that ranks exchange, so that all decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SKETCHED = 4
"""The numbers of a sketch: the more, the less its size is off by chance."""

_MOST = 1e32
"""The largest finite number that is exchanged: the sum over a million ranks is still finite."""


@dataclass(frozen=True)
class Measures:
    """Numbers by parameter of a bucket.

    moments: sums of the residuals' absolute values, with this step's gradients.
    gradients: those of this step's gradients.
    energies: the squared norms of the last columns of R; 0 for what is no matrix or has none yet.
    sketches: SKETCHED random products of each gradient that is a matrix, and none of the others.
    """

    moments: Sequence[float]
    gradients: Sequence[float]
    energies: Sequence[float]
    sketches: Sequence[Sequence[float]]

    def pack(self) -> torch.Tensor:
        """Return the numbers as a tensor of float32, those of matrices last: where the budget is
        small they have a part of it. Finite ones stay finite, so that only a gradient that is not
        finite is taken for one."""
        numbers = [*self.moments, *self.gradients]
        for energy, sketch in zip(self.energies, self.sketches, strict=True):
            if sketch:
                numbers += [energy, *sketch]
        exact = torch.tensor(numbers, dtype=torch.float64)
        return torch.where(exact.isfinite(), exact.clamp(-_MOST, _MOST), exact).float()

    def unpack(self, packed: torch.Tensor) -> Measures:
        """Return what pack() has made of others of the same parameters."""
        numbers = iter(packed.tolist())
        moments = [next(numbers) for _ in self.moments]
        gradients = [next(numbers) for _ in self.gradients]
        energies: list[float] = []
        sketches: list[list[float]] = []
        for own in self.sketches:
            energies.append(next(numbers) if own else 0.0)
            sketches.append([next(numbers) for _ in own])
        return Measures(moments, gradients, energies, sketches)
