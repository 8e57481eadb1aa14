"""Downpour SGD (Dean et al. 2012, *Large scale distributed deep networks*)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torch_hbmcomm.parameter_server.rules.rule import Rule


class Downpour(Rule):
    """The weights move by what the local optimizer moved.

    scale: "mean" divides a difference by the number of live workers, so that a learning rate means
    what it means under DDP; "sum" does not; or any factor. Those of buffers are always divided.
    """

    reads_first = False

    def __init__(self, scale: Literal["mean", "sum"] | float = "mean") -> None:
        if isinstance(scale, str) and scale not in ("mean", "sum"):
            raise ValueError(f'scale is "mean", "sum" or a number, not {scale!r}')
        self._scale = scale

    def __repr__(self) -> str:
        return f"Downpour(scale={self._scale!r})"

    def scale(self, kind: str, workers: int) -> float:
        if kind == "buffer" or self._scale == "mean":
            return 1 / workers
        return 1.0 if self._scale == "sum" else float(self._scale)

    def difference(
        self, local: Tensor, base: Tensor, fresh: Tensor, out: Tensor, workers: int
    ) -> None:
        torch.sub(local, base, out=out)

    def take(self, local: Tensor, base: Tensor, fresh: Tensor, slot: Tensor) -> None:
        local.copy_(fresh)
        base.copy_(local)

    def take_ahead(
        self, local: Tensor, base: Tensor, fresh: Tensor, slot: Tensor, scale: float
    ) -> None:
        torch.add(fresh, slot, alpha=scale, out=local)
        base.copy_(local)
