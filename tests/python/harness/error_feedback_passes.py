"""The native passes of error feedback in plain PyTorch, as a reference.

Each function has the arguments, the effects and the result of its counterpart
`torch_hbmcomm._C.error_feedback_*` (csrc/error_feedback.h). Results are equal bit for bit, except
sums, which the two add in different orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def accumulate(
    gradients: Sequence[Tensor],
    before: Sequence[Tensor | None],
    after: Sequence[Tensor],
    factor: float,
    squares: bool,
) -> Tensor:
    rows = []
    for gradient, old, new in zip(gradients, before, after, strict=True):
        size = gradient.double().abs().sum().item()
        wide = _wide(new)
        before_pass = torch.zeros_like(new) if old is None else old
        new.copy_(before_pass.to(wide) + gradient.to(wide) * factor)
        stored = new.double()
        rows.append([(stored.square() if squares else stored.abs()).sum().item(), size])
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


def pack(residuals: Sequence[Tensor], wire: Tensor, factor: float, inverse: float) -> None:
    for residual, part in zip(residuals, wire.split([c.numel() for c in residuals]), strict=True):
        wide = _wide(residual)
        part.copy_(residual.to(wide) * factor)
        if wire.itemsize < residual.itemsize:
            rest = residual.to(wide) - part.to(wide) * inverse
            residual.copy_(torch.where(part.isfinite(), rest, 0))


def unpack(wire: Tensor, buffer: Tensor, begins: Sequence[int], counts: Sequence[int]) -> bool:
    apart = wire.clone()
    buffer.zero_()
    for begin, count, part in zip(begins, counts, apart.split(list(counts)), strict=True):
        buffer[begin : begin + count] = part
    return bool(apart.isfinite().all())


def threshold(scores: Sequence[float], sizes: Sequence[int], ratio: float) -> float:
    infinite = [math.inf if math.isnan(value) else value for value in scores]
    taken = 0
    for score, size in sorted(zip(infinite, sizes, strict=True)):
        taken += size
        if taken > ratio * sum(sizes):
            return score
    return -1.0


def _wide(residual: Tensor) -> torch.dtype:
    return torch.float64 if residual.dtype == torch.float64 else torch.float32
