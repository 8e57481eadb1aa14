"""The arguments of OuterSteps that must be equal on all ranks, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch

from torch_hbmcomm.parameter_server.config import check_positive, check_whole

_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
_LARGEST = 127  # of int8


@dataclass(frozen=True)
class OuterConfig:
    """Arguments of OuterSteps, which explains them."""

    every: int | None
    outer_lr: float
    momentum: float
    fragments: int
    delay: int
    alpha: float | None
    dtype: torch.dtype | None

    def check(self, ranks: int) -> None:
        """Raise TypeError or ValueError for an argument that does not fit a group of `ranks`."""
        check_positive("fragments", self.fragments)
        check_whole("delay", self.delay)
        for name in ("outer_lr", "momentum", "alpha"):
            value = getattr(self, name)
            if not isinstance(value, Real) and (name, value) != ("alpha", None):
                raise TypeError(f"{name} is a number, not {value!r}")
        if self.outer_lr <= 0:
            raise ValueError(f"outer_lr is more than 0, not {self.outer_lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is in [0, 1), not {self.momentum}")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is in [0, 1], not {self.alpha}; None: keep the late steps")
        if self.dtype not in (None, *_DTYPES):
            allowed = ", ".join(str(dtype) for dtype in _DTYPES)
            raise ValueError(f"dtype is None or one of {allowed}, not {self.dtype}")
        if self.dtype == torch.int8 and ranks > _LARGEST:
            raise ValueError(
                f"dtype=torch.int8 is for at most {_LARGEST} ranks, and the group has {ranks}: "
                "the sum of their deltas would overflow; take torch.bfloat16"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.delay < 0:
            raise ValueError(f"delay is at least 0 steps, not {self.delay}")
        if self.every is None:
            return
        check_positive("every", self.every)
        if self.every % self.fragments:
            raise ValueError(
                f"every={self.every} is no multiple of fragments={self.fragments}: the fragments "
                "meet in turn, every / fragments steps apart"
            )
        if self.delay > self.every // self.fragments:
            raise ValueError(
                f"delay={self.delay} is longer than the {self.every // self.fragments} steps "
                "(every / fragments) to the next meeting: one fragment travels at a time"
            )

    @property
    def interval(self) -> int | None:
        """The steps between two meetings; None: the program calls meet()."""
        return None if self.every is None else self.every // self.fragments

    def levels(self, ranks: int) -> int:
        """Return the largest int8 that a rank sends, so that the sum of all ranks is one too."""
        return _LARGEST // ranks
