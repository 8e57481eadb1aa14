"""The configuration of layer dropping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch_hbmcomm.error_feedback.config import EncoderConfig

Representative = Literal["mean", "l1", "l2"]
Granularity = Literal["parameter", "module"]
Target = Literal["bytes", "paper"]


@dataclass(frozen=True, kw_only=True)
class LayerDrop(EncoderConfig):
    """Layer-wise dropping with error feedback (Lee et al. 2020, *Communication optimization schemes
    for accelerating distributed deep learning systems*).

    A layer whose score is below a threshold is not sent. The paper calls the score a representative
    value. The layer's gradients are added up in an error-feedback residual, the paper's cache
    (equation 1), and sent when the residual's score reaches the threshold (equation 2).

    To reproduce the paper: target="paper", max_age=math.inf, always_send=False.

    Args:
        ratio: R, the part of all gradients that is not sent, in [0, 1). With 0 all is sent, unless
            there is a fixed_threshold
        every: steps between two searches for the threshold (Algorithm 1)
        warmup: the number of first steps that send everything; the first step always does if a
            threshold is searched for
        representative: the score of a layer, computed from its residual: "mean" of the absolute
            values, "l1" or "l2" norm
        granularity: a layer is a "parameter", or all parameters of a "module" together (under DDP
            those that share a bucket)
        min_numel: a layer with fewer elements is always sent, and so is a layer whose parameters
            all have at most one dimension
        always_send: False: the layers that min_numel describes may wait, too
        max_age: the most steps that a layer waits before it is sent; math.inf: no limit; None: four
            times the mean wait, 4 / (1 - ratio), and at least 8
        cache_dtype: the residuals' dtype; None: float32, or float64 for gradients of float64. With
            bfloat16, each step loses the residuals' rounding errors
        fixed_threshold: the threshold of every step; None: the threshold is searched for
        target: "bytes": between two searches the threshold follows the bytes that were sent, so
            that on average 1 - ratio of all bytes is sent. It also falls with a layer's age, so
            that few layers wait until max_age. "paper": the threshold does not change between two
            searches, and more is sent, because residuals grow
        wire_dtype: only for layer_drop_hook. torch.bfloat16: gradients of float32 are sent as
            bfloat16, and the rounding errors stay in the residuals. None: each gradient's own type
        skip_update: only for layer_drop_hook. True: a layer that is dropped keeps its parameters
            and its optimizer's state in that step. False: its gradient is zero in that step, so
            weight decay and momentum change its parameters. None: True with target="bytes", else
            False

    The state or parameter server that is given a LayerDrop checks its arguments. If an argument is
    out of its range or of another type, the rank that gave it raises ValueError or TypeError, and
    each other rank RuntimeError. A ParameterServer with `box` raises only on the worker that gave
    the argument.
    """

    every: int = 100
    representative: Representative = "mean"
    granularity: Granularity = "parameter"
    min_numel: int = 4096
    always_send: bool = True
    max_age: float | None = None
    fixed_threshold: float | None = None
    target: Target = "bytes"

    sent_whole: ClassVar[str] = "one dimension"

    def check(self) -> None:
        super().check()
        self._check_integer("every", 1)
        if self.max_age not in (None, math.inf):
            self._check_integer("max_age", 1)
        self._check_choice("representative", Representative)
        self._check_choice("granularity", Granularity)
        self._check_choice("target", Target)
        threshold = self.fixed_threshold
        if threshold is not None:
            self._check_real("fixed_threshold")
            if not (threshold >= 0 and math.isfinite(threshold)):
                raise ValueError(f"fixed_threshold is a finite number from 0 up, not {threshold}")

    @property
    def oldest(self) -> float:
        """The most steps that a layer waits: max_age, or its default."""
        return self.usual_max_age if self.max_age is None else self.max_age

    @property
    def skips_updates(self) -> bool:
        return self.target == "bytes" if self.skip_update is None else self.skip_update

    @property
    def saves_bytes(self) -> bool:
        return super().saves_bytes and self.fixed_threshold is None

    @property
    def squares(self) -> bool:
        """True if layer sums are L2 sums (of squares), not L1 sums (of absolute values)."""
        return self.representative == "l2"
