"""What a worker sends, and how it takes in the weights: the seam behind which rules lie.

A rule is given one-dimensional tensors of equal length, parts of the model: `local`, the worker's
own; `base`, what it took in last; `fresh`, the weights as read from the box, which it must not
change; `slot`, what is sent, and the box adds to the weights times scale(). `slot` may be of a
narrower type than the others, and then is what was left of the difference by rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Rule(ABC):
    """Named in error messages, and compared between the workers of a job, by repr()."""

    reads_first: ClassVar[bool]
    """Whether the weights are read before the difference is computed, or after it was added."""

    @abstractmethod
    def scale(self, kind: str, workers: int) -> float:
        """What the box multiplies a difference with. kind: "parameter" or "buffer" (a running
        statistic). workers: that are alive."""

    @abstractmethod
    def difference(
        self, local: Tensor, base: Tensor, fresh: Tensor, out: Tensor, workers: int
    ) -> None:
        """Sets `out`; changes nothing else."""

    @abstractmethod
    def take(self, local: Tensor, base: Tensor, fresh: Tensor, slot: Tensor) -> None:
        """Sets `local` and `base` at the end of an exchange: `fresh` has `slot` in it, unless the
        rule reads first."""

    def take_unsent(self, local: Tensor, base: Tensor, fresh: Tensor) -> None:
        """Takes in what others changed of a layer that was dropped: the difference, local - base,
        goes on waiting. `fresh` may change meanwhile, and is read once. REQUIRES: not
        reads_first."""
        local.sub_(base)
        base.copy_(fresh)
        local.add_(base)

    @abstractmethod
    def take_ahead(
        self, local: Tensor, base: Tensor, fresh: Tensor, slot: Tensor, scale: float
    ) -> None:
        """As take(), when scale * slot is not in `fresh` yet: it is on its way while the worker
        goes on."""
