"""The configuration of layer dropping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

import torch

Representative = Literal["mean", "l1", "l2"]
Granularity = Literal["parameter", "module"]
Target = Literal["low_rank", "bytes", "paper"]

CACHE_DTYPES = (torch.float32, torch.bfloat16)  # float16 would overflow when gradients add up

_OF_WHOLE_LAYERS = (
    *("every", "representative", "granularity"),
    *("always_send", "max_age", "fixed_threshold"),
)
_AGE_FACTOR = 4  # times the mean wait of 1 / (1 - ratio) steps
_LEAST_AGE = 8

_RELAXATION = 1.2  # at most: beyond 1 it is _RELAXED of the part that is sent
_RELAXED = 0.02
_DAMPING = 0.25  # grows from 0 along the first of these two ranges of R, and once more by the other
_DAMPED = (0.5, 0.8), (0.9, 0.95)

_MIN_NUMEL = 4096
_MIN_NUMEL_OF_MATRICES = 64  # of which rank 1 takes a quarter; below, there is little to save


@dataclass(frozen=True, kw_only=True)
class LayerDrop:
    """Layer-wise dropping with error feedback (Lee et al. 2020, *Communication optimization schemes
    for accelerating distributed deep learning systems*).

    A layer whose representative value is below a threshold is not sent; its gradients are added up
    in a cache (equation 1) and sent when the sum's representative reaches the threshold (equation
    2). With target="low_rank" all layers are sent in every step, but not whole: a low-rank
    approximation of what is cached, and the rest stays cached.

    To reproduce the paper: target="paper", max_age=math.inf, always_send=False.

    Args:
        ratio: R, the part of all gradients that is not sent, in [0, 1); with 0 all is sent
        every: steps between two searches for the threshold (Algorithm 1)
        warmup: first steps, in which everything is sent; where a threshold is searched for the
            first one always is
        representative: of a layer's accumulated gradient, on both sides of the threshold: "mean"
            of the absolute values, "l1" or "l2" norm
        granularity: what a layer is: a "parameter", or all of a "module"'s together (under DDP its
            parameters that share a bucket)
        min_numel: a layer with fewer elements is always sent whole, and so is one without a
            parameter of two dimensions; None: 4096, and with target="low_rank", where a small
            matrix has a rank as well, 64
        always_send: whether there are such layers
        max_age: steps that a layer waits at most before it is sent; math.inf: for ever; None: four
            times the mean wait, 4 / (1 - ratio), and at least 8
        cache_dtype: of the caches; None: float32 (float64 for float64). With bfloat16, what
            rounding takes away in each step is lost.
        fixed_threshold: instead of one that is searched for
        target: "bytes": between two searches the threshold follows the bytes really sent, so that
            their mean is 1 - ratio of all; it also falls with a layer's age, so that few wait to
            the limit. "paper": it stays as it was found, and more is sent, because caches grow.
            "low_rank", under DDP only: there is no threshold, and of what follows `ratio` only
            warmup, min_numel and cache_dtype have a meaning.
        relaxation: with target="low_rank": what is sent of an approximation, in (0, 2), and taken
            out of the cache. Above 1 the cache owes the rest to the next gradients, which go on in
            the same directions: training lags less behind. Not at all: 1. None: 1.2 from R = 0.9
            on, and the more is sent the less: 1.1 at R = 0.8
        damping: with target="low_rank": the part, in [0, 1], of SGD's momentum that goes in each
            step along the directions in which something was sent. Not at all: 0. None: 0 up to
            R = 0.5, 0.25 from R = 0.8 to 0.9, 0.5 from R = 0.95 on, and between these along
            straight lines

    Raises:
        ValueError, TypeError: an argument is out of its range, or of another type
    """

    ratio: float = 0.9
    every: int = 100
    warmup: int = 0
    representative: Representative = "mean"
    granularity: Granularity = "parameter"
    min_numel: int | None = None
    always_send: bool = True
    max_age: float | None = None
    cache_dtype: torch.dtype | None = None
    fixed_threshold: float | None = None
    target: Target = "bytes"
    relaxation: float | None = None
    damping: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("warmup", 0), ("min_numel", 0), ("max_age", 1)):
            value = getattr(self, name)
            unlimited = name == "max_age" and value == math.inf
            if unlimited or (name in ("min_numel", "max_age") and value is None):
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"{name} is a whole number, not {value!r}")
            if value < least:
                raise ValueError(f"{name} is at least {least}, not {value}")
        for name in ("ratio", "fixed_threshold", "relaxation", "damping"):
            value = getattr(self, name)
            if not isinstance(value, Real) and (name == "ratio" or value is not None):
                raise TypeError(f"{name} is a number, not {value!r}")
        if not 0 <= self.ratio < 1:
            raise ValueError(f"ratio is in [0, 1), not {self.ratio}: with 1 nothing would be sent")
        if not 0 < self.relaxed < 2:
            raise ValueError(
                f"relaxation is in (0, 2), not {self.relaxation}: beyond, caches would only grow"
            )
        if not 0 <= self.damped <= 1:
            raise ValueError(f"damping is in [0, 1], not {self.damping}")
        for name, choices in (
            ("representative", Representative),
            ("granularity", Granularity),
            ("target", Target),
        ):
            if getattr(self, name) not in get_args(choices):
                allowed = ", ".join(f'"{choice}"' for choice in get_args(choices))
                raise ValueError(f"{name} is one of {allowed}, not {getattr(self, name)!r}")
        if self.cache_dtype not in (None, *CACHE_DTYPES):
            raise ValueError(
                f"cache_dtype is None, {', '.join(map(str, CACHE_DTYPES))}, not {self.cache_dtype}"
            )
        threshold = self.fixed_threshold
        if threshold is not None and not (threshold >= 0 and math.isfinite(threshold)):
            raise ValueError(f"fixed_threshold is a finite number from 0 up, not {threshold}")

        if self.target == "low_rank":
            self._check_low_rank()
            return
        for name in ("relaxation", "damping"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} is for approximations: choose "
                    f'target="low_rank", and not "{self.target}"'
                )

    def _check_low_rank(self) -> None:
        defaults = LayerDrop()
        for name in _OF_WHOLE_LAYERS:
            if getattr(self, name) != getattr(defaults, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for layers that are sent whole or not at "
                    'all: choose target="bytes" or "paper", and not "low_rank"'
                )

    @property
    def least_numel(self) -> int:
        """The elements of the smallest layer that is not always sent: min_numel, or its default."""
        if self.min_numel is not None:
            return self.min_numel
        return _MIN_NUMEL_OF_MATRICES if self.target == "low_rank" else _MIN_NUMEL

    @property
    def oldest(self) -> float:
        """The steps that a layer waits at most: max_age, or its default."""
        if self.max_age is not None:
            return self.max_age
        return max(_LEAST_AGE, round(_AGE_FACTOR / (1 - self.ratio)))

    @property
    def relaxed(self) -> float:
        """The multiple of an approximation that is sent: relaxation, or its default."""
        if self.relaxation is not None:
            return self.relaxation
        return min(_RELAXATION, 1 + _RELAXED / (1 - self.ratio))

    @property
    def damped(self) -> float:
        """The part of momentum that goes: damping, or its default."""
        if self.damping is not None:
            return self.damping
        shares = ((self.ratio - begin) / (end - begin) for begin, end in _DAMPED)
        return _DAMPING * sum(min(max(share, 0.0), 1.0) for share in shares)

    @property
    def squares(self) -> bool:
        """Whether moments are sums of squares, or else of absolute values."""
        return self.representative == "l2"
