"""What of a worker's differences is sent: the seam behind which dropping lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torch_hbmcomm.parameter_server.layout import Piece
from torch_hbmcomm.parameter_server.tensors import is_finite


class Selection(Protocol):
    """Weights are of the pieces of the layout that change, in their order."""

    def weigh(self, difference: torch.Tensor) -> float:
        """Of one piece; NaN if an element is not finite."""

    def choose(self, weights: Sequence[float]) -> Sequence[Piece]:
        """What an exchange sends."""

    def pending(self, weights: Sequence[float]) -> Sequence[Piece]:
        """All that is not sent yet."""

    def stats(self) -> dict[str, int | float]: ...

    def state_dict(self) -> dict[str, Any]:
        """When nothing waits to be sent."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of a job that had this selection or another one."""


class Everything:
    """changing: the layout's."""

    def __init__(self, changing: Sequence[Piece]) -> None:
        self._changing = changing

    def weigh(self, difference: torch.Tensor) -> float:
        return 1.0 if is_finite(difference) else math.nan

    def choose(self, weights: Sequence[float]) -> Sequence[Piece]:
        return self._changing

    def pending(self, weights: Sequence[float]) -> Sequence[Piece]:
        return self._changing

    def stats(self) -> dict[str, int | float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
