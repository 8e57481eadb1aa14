"""The configuration of low-rank approximations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_hbmcomm.error_feedback.config import EncoderConfig

_RELAXATION = 1.2  # the default is 1 + _RELAXED / (1 - R), and at most this
_RELAXED = 0.02
_DAMPING = 0.25  # the default grows from 0 by this along each of the two ranges of R
_DAMPED = (0.5, 0.8), (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class LowRank(EncoderConfig):
    """Low-rank approximations with error feedback, after PowerSGD (Vogels et al. 2019, *PowerSGD:
    Practical low-rank gradient compression for distributed optimization*).

    Each step sends a low-rank approximation of each matrix of residuals, and keeps the rest. The
    ranks of the approximations follow from `ratio`, and from the part of the residuals that each
    column takes out.

    Args:
        ratio: R, the part of the bytes that is not sent, in [0, 1); with 0 all is sent. "auto":
            the state measures steps, and chooses. It sends everything whole as DDP does, everything
            as bfloat16, or a tenth (R = 0.9). It measures and chooses again every 1,000 steps
        warmup: the number of first steps that send everything
        min_numel: a parameter with fewer elements is always sent whole. So is a parameter of fewer
            than two dimensions, and a parameter for which rank 1 saves no bytes, such as a matrix
            of one row. None: 64
        cache_dtype: the residuals' dtype; None: float32, or float64 for gradients of float64. With
            bfloat16, each step loses the residuals' rounding errors
        wire_dtype: torch.bfloat16: gradients of float32 are sent as bfloat16, and the rounding
            errors stay in the residuals. None: each gradient's own type
        skip_update: True: a parameter of which nothing is sent keeps its value and its optimizer's
            state in that step. None: False
        relaxation: the factor, in (0, 2), of each approximation that is sent and subtracted from
            the residuals. A factor above 1 sends too much, but training lags less: the next
            gradients make up for the excess, because they mostly have the same directions. None:
            1.2 from R = 0.9 on, and less for a smaller R (1.1 at R = 0.8)
        damping: the part of SGD's momentum, in [0, 1], that each step removes along the directions
            that were sent. None: 0 up to R = 0.5, 0.25 from R = 0.8 to 0.9, 0.5 from R = 0.95 on,
            and linear in between

    The state that is given a LowRank checks its arguments. If an argument is out of its range or of
    another type, the rank that gave it raises ValueError or TypeError, and each other rank
    RuntimeError.
    """

    relaxation: float | None = None
    damping: float | None = None

    sent_whole: ClassVar[str] = "one dimension, one row"

    def check(self) -> None:
        super().check()
        for name in ("relaxation", "damping"):
            if getattr(self, name) is not None:
                self._check_real(name)
        if not 0 < self.relaxed < 2:
            raise ValueError(
                f"relaxation is in (0, 2), not {self.relaxation}: beyond, residuals would only grow"
            )
        if not 0 <= self.damped <= 1:
            raise ValueError(f"damping is in [0, 1], not {self.damping}")

    @property
    def relaxed(self) -> float:
        """The factor of each approximation that is sent: relaxation, or its default."""
        if self.relaxation is not None:
            return self.relaxation
        return min(_RELAXATION, 1 + _RELAXED / (1 - self.unsent))

    @property
    def damped(self) -> float:
        """The part of momentum that is removed: damping, or its default."""
        if self.damping is not None:
            return self.damping
        shares = ((self.unsent - begin) / (end - begin) for begin, end in _DAMPED)
        return _DAMPING * sum(min(max(share, 0.0), 1.0) for share in shares)
