"""Low-rank approximations of given gradients, written down once more, for all ranks at once and in
float64."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class PowerSgd:
    """PowerSGD (Vogels et al. 2019, Algorithm 1) with a rank of its own for each matrix and step;
    of the columns that it starts from every other one is new in each step.

    relaxation: what is sent of an approximation, and leaves the caches.
    """

    relaxation: float = 1.2
    caches: list[list[torch.Tensor]] = field(default_factory=list)  # by rank
    rights: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: int = 0

    def step(
        self,
        of_ranks: Sequence[Sequence[torch.Tensor]],
        ranks: Mapping[str, int],
        matrices: Mapping[str, tuple[int, int]],
    ) -> list[torch.Tensor]:
        """Return what the step yields.

        ranks, matrices: rank, and rows and columns, of the parameters that are approximated; the
            others are sent whole
        """
        if not self.caches:
            self.caches = [[torch.zeros_like(g).double() for g in own] for own in of_ranks]
        for cache, own in zip(self.caches, of_ranks, strict=True):
            for total, gradient in zip(cache, own, strict=True):
                total += gradient
        yields = [self._yield(f"all.{i}", i, ranks, matrices) for i in range(len(of_ranks[0]))]
        self.steps += 1
        return yields

    def _yield(
        self,
        name: str,
        index: int,
        ranks: Mapping[str, int],
        matrices: Mapping[str, tuple[int, int]],
    ) -> torch.Tensor:
        mean = torch.stack([cache[index] for cache in self.caches]).mean(0)
        if name not in matrices:
            for cache in self.caches:
                cache[index].zero_()
            return mean
        rank = ranks[name]
        if rank == 0:
            return torch.zeros_like(mean)
        rows, columns = matrices[name]
        old = self.rights.get(name, torch.zeros(columns, 0).double())[:, : -(-rank // 2)]
        draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {self.steps}".encode()))
        new = torch.randn(rank - old.shape[1], columns, generator=draw, dtype=torch.float64).T
        projected = mean.view(rows, columns) @ torch.cat([old / old.norm(dim=0), new], 1)
        basis, _ = torch.linalg.qr(projected)
        self.rights[name] = mean.view(rows, columns).T @ basis
        for cache in self.caches:
            own = cache[index].view(rows, columns)
            own -= self.relaxation * basis @ (basis.T @ own)
        approximation: torch.Tensor = (basis @ self.rights[name].T).view(mean.shape)
        return self.relaxation * approximation
