"""Elastic averaging (Zhang et al. 2015, *Deep learning with elastic averaging SGD*)."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hbmcomm.parameter_server.rules.rule import Rule

_BETA = 0.9  # the paper's, section 5


class Elastic(Rule):
    """Workers explore on their own; an elastic force draws them and the center, the weights in the
    box, together (equations 5 and 6): e = alpha * (local - center), local -= e, center += e.

    alpha: None is 0.9 / (live workers), the paper's beta = 0.9.
    """

    reads_first = True

    def __init__(self, alpha: float | None = None) -> None:
        if alpha is not None and not 0 < alpha <= 1:
            raise ValueError(f"alpha is more than 0 and at most 1, not {alpha}")
        self._alpha = alpha

    def __repr__(self) -> str:
        return f"Elastic(alpha={self._alpha!r})"

    def scale(self, kind: str, workers: int) -> float:
        return 1.0

    def difference(
        self, local: Tensor, base: Tensor, fresh: Tensor, out: Tensor, workers: int
    ) -> None:
        alpha = _BETA / workers if self._alpha is None else self._alpha
        torch.sub(local, fresh, out=out).mul_(alpha)

    def take(self, local: Tensor, base: Tensor, fresh: Tensor, slot: Tensor) -> None:
        local.sub_(slot)

    def take_ahead(
        self, local: Tensor, base: Tensor, fresh: Tensor, slot: Tensor, scale: float
    ) -> None:
        local.sub_(slot)
