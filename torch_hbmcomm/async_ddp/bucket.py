"""A bucket of DDP's gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_hbmcomm.async_ddp.places import Piece, Space
from torch_hbmcomm.parameter_server.tensors import is_finite


@dataclass(frozen=True)
class Plan:
    """Which parameters a bucket has, in which order, and how they travel."""

    space: Space
    names: tuple[str, ...]
    pieces: Sequence[Piece]

    def clear_not_finite(self, gradients: torch.Tensor) -> list[str]:
        """Sets gradients that have an element which is not finite to zero; returns their names."""
        cleared = []
        if not is_finite(gradients):
            for name, gradient in zip(self.names, self._gradients(gradients), strict=True):
                if not is_finite(gradient):
                    gradient.zero_()
                    cleared.append(name)
        return cleared

    def _gradients(self, gradients: torch.Tensor) -> Iterator[torch.Tensor]:
        at = 0
        for name in self.names:
            place = self.space.ranges[name]
            count = place.stop - place.start
            yield gradients[at : at + count]
            at += count
