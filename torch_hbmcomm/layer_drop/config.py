"""The configuration of layer dropping."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch_hbmcomm.error_feedback.config import AUTO, EncoderConfig

Representative = Literal["mean", "l1", "l2"]
Granularity = Literal["parameter", "module"]
Target = Literal["bytes", "paper", "blocks"]

_NOT_FOR_BLOCKS = {
    "every",
    "representative",
    "granularity",
    "always_send",
    "fixed_threshold",
    "skip_update",
}

MOST_LEVELS = 127
"""The largest `levels`: the number of a rank fits into a byte."""

# The default of `min_numel`.
_LEAST_LAYER = 4096

# The default of `block` is the least power of 2 that is at least this, divided by 1 - ratio. So the
# numbers that choose the blocks are at most a 24th of the sent bytes.
_BLOCK_PART = 24


@dataclass(frozen=True, kw_only=True)
class LayerDrop(EncoderConfig):
    """Layer-wise dropping with error feedback (Lee et al. 2020, *Communication optimization schemes
    for accelerating distributed deep learning systems*).

    A layer whose score is below a threshold is not sent. The paper calls the score a representative
    value. The layer's gradients are added up in an error-feedback residual, the paper's cache
    (equation 1), and sent when the residual's score reaches the threshold (equation 2).

    To reproduce the paper: target="paper", max_age=math.inf, always_send=False.

    With target="blocks" a parameter is cut into blocks, and each block is sent, or waits, by
    itself. Then the settings every, representative, granularity, always_send, fixed_threshold and
    skip_update have no meaning, and stay at their defaults.

    Args:
        ratio: R, the part of all gradients that is not sent, in [0, 1). With 0 all is sent, unless
            there is a fixed_threshold. "auto", only for layer_drop_hook: the state measures steps,
            and chooses. It sends everything whole as DDP does, everything as bfloat16, or a tenth
            (R = 0.9). It measures and chooses again every 1,000 steps
        every: steps between two searches for the threshold (Algorithm 1)
        warmup: the number of first steps that send everything; the first step always does if a
            threshold is searched for
        representative: the score of a layer, computed from its residual: "mean" of the absolute
            values, "l1" or "l2" norm
        granularity: a layer is a "parameter", or all parameters of a "module" together (under DDP
            those that share a bucket)
        min_numel: a layer with fewer elements is always sent, and so is a layer whose parameters
            all have at most one dimension. None: 4,096. With target="blocks" None sends
            matrices below 4,096 elements whole, the smallest first. All that is sent whole then
            takes at most half of the bytes that `ratio` allows
        always_send: False: the layers that min_numel describes may wait, too
        max_age: the most steps that a layer waits before it is sent; math.inf: no limit; None: four
            times the mean wait, 4 / (1 - ratio), and at least 8
        cache_dtype: the residuals' dtype; None: float32, or float64 for gradients of float64. With
            bfloat16, each step loses the residuals' rounding errors
        fixed_threshold: the threshold of every step; None: the threshold is searched for. Not with
            ratio="auto"
        target: "bytes": between two searches the threshold follows the bytes that were sent, so
            that on average 1 - ratio of all bytes is sent. It also falls with a layer's age, so
            that few layers wait until max_age. "paper": the threshold does not change between two
            searches, and more is sent, because residuals grow. "blocks", only for
            layer_drop_hook: each parameter sends an equal part of its blocks in each step, so that
            1 - ratio of all bytes is sent. These are the blocks with the largest residuals for
            the usual size of their gradients. In the optimizer's step a block that waits keeps
            its elements and their moments, and a block that waited k steps makes up for k steps
        block: only for target="blocks": elements of a block, in the order of memory; None: from
            24 / (1 - ratio) to twice as many, a power of 2. A parameter has at least 8 blocks
        levels: only for target="blocks": the elements of float32 blocks are sent as whole numbers
            from -levels to levels, packed together, and the rounding errors stay in the residuals.
            So more blocks fit into the part 1 - ratio of the bytes. None: as they are
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
    always_send: bool = True
    max_age: float | None = None
    fixed_threshold: float | None = None
    target: Target = "bytes"
    block: int | None = None
    levels: int | None = None

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
            if self.ratio == AUTO:
                raise ValueError(
                    'ratio="auto" chooses how much is sent, and so does fixed_threshold: give one'
                )
        for name in ("block", "levels"):
            if getattr(self, name) is not None:
                self._check_integer(name, 1)
                if self.target != "blocks":
                    raise ValueError(
                        f'{name} is for target="blocks", and target is "{self.target}"'
                    )
        if self.target == "blocks":
            self._check_blocks()

    def _check_blocks(self) -> None:
        """Raise ValueError for a setting that has no meaning for blocks."""
        for field in fields(self):
            if field.name in _NOT_FOR_BLOCKS and getattr(self, field.name) != field.default:
                raise ValueError(
                    f'{field.name} has no meaning with target="blocks": leave it at {field.default}'
                )
        if self.levels is not None and self.levels > MOST_LEVELS:
            raise ValueError(f"levels is at most {MOST_LEVELS}, not {self.levels}")
        if self.levels is not None and self.wire_dtype is not None:
            raise ValueError(
                "levels and wire_dtype are two types of the same elements on the wire: give one"
            )

    @property
    def usual_min_numel(self) -> int:
        return _LEAST_LAYER

    @property
    def block_size(self) -> int:
        """The elements of a block: `block`, or its default."""
        least = math.ceil(_BLOCK_PART / (1 - self.unsent))
        return 1 << (least - 1).bit_length() if self.block is None else self.block

    @property
    def rounds(self) -> bool:
        return super().rounds or self.levels is not None

    @property
    def oldest(self) -> float:
        """The most steps that a layer waits: max_age, or its default."""
        return self.usual_max_age if self.max_age is None else self.max_age

    @property
    def skips_updates(self) -> bool:
        return self.target == "bytes" if self.skip_update is None else self.skip_update

    @property
    def sends_evenly(self) -> bool:
        return self.target == "blocks"

    @property
    def saves_bytes(self) -> bool:
        return super().saves_bytes and self.fixed_threshold is None

    @property
    def squares(self) -> bool:
        """True if layer sums are L2 sums (of squares), not L1 sums (of absolute values)."""
        return self.representative == "l2"
