"""Models whose gradients are approximated, and a second implementation of the approximations, for
all ranks together and in float64."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from harness.context import Context
from harness.hooks import low_rank
from harness.layer_drop_ddp import SHAPES, Weighted, wrapped
from torch_hbmcomm.low_rank.ranks import Matrix
from torch_hbmcomm.low_rank.rule import LowRankRule

MATRICES = {
    **{"all.1": (61, 101), "all.2": (15, 7), "all.3": (80, 80)},
    **{"all.5": (97, 89), "all.7": (41, 217)},
}


@dataclass
class PowerSgd:
    """PowerSGD (Vogels et al. 2019, Algorithm 1), with a separate rank for each matrix and step.

    At most half of the start columns, rounded up, come from the previous step; the rest are new.

    relaxation: the multiple of an approximation that is sent, and is subtracted from the residuals.
    """

    relaxation: float = 1.2
    residuals: list[list[torch.Tensor]] = field(default_factory=list)  # by rank
    rights: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: int = 0

    def step(
        self,
        of_ranks: Sequence[Sequence[torch.Tensor]],
        ranks: Mapping[str, int],
        matrices: Mapping[str, tuple[int, int]],
    ) -> list[torch.Tensor]:
        """Return each parameter's gradient after the exchange of the step.

        ranks: ranks of the approximated parameters; all other parameters are sent whole.
        matrices: rows and columns of the approximated parameters.
        """
        if not self.residuals:
            self.residuals = [[torch.zeros_like(g).double() for g in own] for own in of_ranks]
        for residual, own in zip(self.residuals, of_ranks, strict=True):
            for total, gradient in zip(residual, own, strict=True):
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
        mean = torch.stack([residual[index] for residual in self.residuals]).mean(0)
        if name not in matrices:
            for residual in self.residuals:
                residual[index].zero_()
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
        for residual in self.residuals:
            own = residual[index].view(rows, columns)
            own -= self.relaxation * basis @ (basis.T @ own)
        approximation: torch.Tensor = (basis @ self.rights[name].T).view(mean.shape)
        return self.relaxation * approximation


def started(
    context: Context,
    ddp_options: Any = None,
    backend: str = "hbm",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[DistributedDataParallel, hbmcomm.LowRankState]:
    group = dist.new_group(backend=backend)
    ddp = wrapped(Weighted(dtype), process_group=group, **(ddp_options or {}))
    state = low_rank(ddp, **options)
    return ddp, state


def normal(context: Context, rank: int, step: int) -> list[torch.Tensor]:
    """Return gradients of normal noise, larger in later layers.

    A matrix also has a part of rank 1, which is equal in all steps and on all ranks.
    """
    draw = torch.Generator().manual_seed(context.seed + 1000 * step + rank)
    steady = torch.Generator().manual_seed(context.seed)
    found = []
    for index, shape in enumerate(SHAPES):
        noise = torch.randn(shape, generator=draw)
        if len(shape) > 1:
            left = torch.randn((*shape[:-1], 1), generator=steady)
            noise += left * torch.randn(shape[-1], generator=steady)
        found.append(noise * (1 + index))
    return found


def wide_normal(context: Context, rank: int, step: int) -> list[torch.Tensor]:
    return [gradient.double() for gradient in normal(context, rank, step)]


def ranks_now(state: hbmcomm.LowRankState) -> dict[str, int]:
    """Return the rank of each matrix's approximation in the step of the last backward()."""
    encoder = state._encoder
    assert isinstance(encoder, LowRankRule)
    return {name: encoder.rank(Matrix(name, *sides, 4)) for name, sides in MATRICES.items()}


def backward(ddp: DistributedDataParallel, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(*weights).backward()
    found = [parameter.grad for parameter in ddp.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def assert_near(found: torch.Tensor, expected: torch.Tensor, about: str) -> None:
    distance = (found.double() - expected).norm() / (expected.norm() + 1e-9)
    bound = 1e-9 if found.dtype == torch.float64 else 1e-4
    assert distance < bound, f"{about}: {distance:.1e} away"
