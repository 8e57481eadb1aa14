"""Settings that the configurations of all encoders have."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, get_args

import torch

RESIDUAL_DTYPES = (torch.float32, torch.bfloat16)  # sums of gradients would overflow float16

AUTO = "auto"
AUTO_RATIO = 0.9
"""The ratio that ratio="auto" may choose. At 0.95 some trainings lose points of accuracy."""

# Rank 1 saves three quarters of an 8 x 8 matrix. It saves less of smaller matrices.
_LEAST_MATRIX = 64
_AGE_FACTOR = 4  # times the mean wait of 1 / (1 - ratio) steps
_LEAST_AGE = 8


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Base of LayerDrop and LowRank, which document the settings.

    The constructor checks nothing. A state, or a parameter server of a group, calls check() on all
    ranks together, so that a bad setting of one rank raises on every rank.
    """

    ratio: float | Literal["auto"] = 0.9
    warmup: int = 0
    cache_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    skip_update: bool | None = None
    min_numel: int | None = None

    sent_whole: ClassVar[str]
    """Text for a warning: the parameters that are always sent whole, besides those below
    min_numel."""

    def check(self) -> None:
        """Raise ValueError or TypeError for a setting out of its range or of another type."""
        self._check_ratio()
        self._check_integer("warmup", 0)
        if self.min_numel is not None:
            self._check_integer("min_numel", 0)
        self._check_dtype("cache_dtype", RESIDUAL_DTYPES)
        self._check_dtype("wire_dtype", (torch.bfloat16,))
        if self.skip_update not in (None, True, False):
            raise TypeError(f"skip_update is True, False or None, not {self.skip_update!r}")

    @property
    def usual_min_numel(self) -> int:
        """The default of min_numel."""
        return _LEAST_MATRIX

    @property
    def least_numel(self) -> int:
        """The elements from which on a parameter may be sent in part: min_numel, or its default."""
        return self.usual_min_numel if self.min_numel is None else self.min_numel

    @property
    def rounds(self) -> bool:
        """True if gradients are sent with fewer bits than they have."""
        return self.wire_dtype is not None

    @property
    def unsent(self) -> float:
        """R as a number: the ratio, or the one that "auto" may choose."""
        return AUTO_RATIO if isinstance(self.ratio, str) else self.ratio

    @property
    def usual_max_age(self) -> int:
        """The default age limit, in steps: four times the mean wait of 1 / (1 - ratio) steps, and
        at least 8."""
        return max(_LEAST_AGE, round(_AGE_FACTOR / (1 - self.unsent)))

    @property
    def sends_evenly(self) -> bool:
        """Return True if the steps of the encoder send about equal bytes."""
        return True

    @property
    def skips_updates(self) -> bool:
        """Return True if parameters of which nothing was sent skip the optimizer's step."""
        return bool(self.skip_update)

    @property
    def saves_bytes(self) -> bool:
        """Return True if `ratio` sets how many bytes are sent."""
        return not isinstance(self.ratio, str) and self.ratio > 0

    def _check_ratio(self) -> None:
        if self.ratio == AUTO:
            return
        if isinstance(self.ratio, str):
            raise ValueError(f'ratio is a number in [0, 1) or "{AUTO}", not {self.ratio!r}')
        self._check_real("ratio")
        if not 0 <= self.ratio < 1:
            raise ValueError(f"ratio is in [0, 1), not {self.ratio}: with 1 nothing would be sent")

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name} is a whole number, not {value!r}")
        if int(value) < least:
            raise ValueError(f"{name} is at least {least}, not {value}")

    def _check_real(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, Real):
            raise TypeError(f"{name} is a number, not {value!r}")

    def _check_dtype(self, name: str, allowed: tuple[torch.dtype, ...]) -> None:
        value = getattr(self, name)
        if value not in (None, *allowed):
            raise ValueError(f"{name} is None or {' or '.join(map(str, allowed))}, not {value}")

    def _check_choice(self, name: str, choices: Any) -> None:
        value = getattr(self, name)
        if value not in get_args(choices):
            allowed = ", ".join(f'"{choice}"' for choice in get_args(choices))
            raise ValueError(f"{name} is one of {allowed}, not {value!r}")
