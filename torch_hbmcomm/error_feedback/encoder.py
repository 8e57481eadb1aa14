"""The interface of an encoder, which chooses the part of a bucket that a step sends.

LayerDropEncoder and LowRankEncoder implement it. docs/design/gradient-compression.md says how to
add a third.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.residuals import Residuals


@dataclass(frozen=True)
class Accumulated:
    """A bucket whose gradients have been added to the residuals.

    gradients: this step's gradients, by parameter, as DDP has them.
    factor: the number that undoes the scaler; factor * gradient was added to the residual.
    residual_sums: by parameter, L1 sums of the residuals; L2 sums (of squares) if Encoder.squares.
    sizes: by parameter, L1 sums of the gradients, not multiplied by factor.
    wire_factor: the wire has wire_factor * residual.
    """

    layers: BucketLayers
    gradients: Sequence[torch.Tensor]
    factor: float
    residual_sums: Sequence[float]
    sizes: Sequence[float]
    residuals: Residuals
    wire_factor: float


class Code(Protocol):
    """Parameters of a bucket that are sent as fewer numbers than they have elements.

    The numbers of all ranks are averaged, so a code must be linear in the residuals once the ranks
    have agreed on it. Codes of integers are added up, and nearly linear: the residuals keep the
    rounding errors.

    dtype: an integer dtype of the code on the wire; None: the bucket's dtype on the wire.
    """

    dtype: torch.dtype | None

    @property
    def parameters(self) -> Collection[int]:
        """The parameters by index in the bucket, in ascending order."""

    @property
    def numel(self) -> int:
        """The number of elements on the wire."""

    @property
    def elements(self) -> int:
        """The number of elements that are sent: numel, or more if several are packed in one."""

    def take_out(self, wire: torch.Tensor) -> None:
        """Write the code of this rank's residuals to the wire, and subtract the coded values from
        the residuals."""

    def restore(self, wire: torch.Tensor, buffer: torch.Tensor, scale: float) -> bool:
        """Decode the averaged code, or the sum of the ranks' integers, into its parameters' ranges
        of the bucket.

        Called in the thread that completes the allreduce.

        Args:
            scale: the GradScaler's factor, by which the averages are multiplied

        Returns True if all values are finite.
        """


@dataclass(frozen=True)
class Encoded:
    """The encoder's choice for one bucket. Only the values of `code` differ between ranks.

    whole: parameters that are sent whole, by index in the bucket, in ascending order.
    code: encodes other parameters; None: nothing else is sent.
    residual_sums: Accumulated.residual_sums, averaged over the ranks.
    overhead: bytes that this rank has sent to make the choice.
    """

    whole: Sequence[int]
    code: Code | None
    residual_sums: Sequence[float]
    overhead: int


class Encoder(Protocol):
    """Chooses the part of each bucket that is sent, from numbers that are equal on all ranks.

    A step is encode() or pass_whole() for each bucket, then end_step() or cancel_step(). Parameters
    that are not sent wait, and are zero in `.grad`.
    """

    @property
    def squares(self) -> bool:
        """True if encode() needs L2 sums (of squares) of the residuals, not L1 sums."""

    @property
    def sends_all(self) -> bool:
        """True if this step sends everything whole."""

    @property
    def waited(self) -> Mapping[str, int]:
        """Steps since each waiting parameter was sent, by its name."""

    def encode(self, bucket: Accumulated, averager: Averager) -> Encoded:
        """Choose the part of a bucket that is sent. All ranks call it. It uses only `averager` for
        collectives, which are complete when it returns."""

    def pass_whole(self, layers: BucketLayers) -> None:
        """Note a bucket that was averaged whole, without error feedback."""

    def end_step(self) -> None:
        """End the step, and choose settings of the next step."""

    def cancel_step(self) -> None:
        """Forget everything since the last end_step()."""

    def forget_waiting(self) -> None:
        """Forget the parameters that wait. Called by drain(), which has applied all residuals, and
        with ratio="auto" before steps that send all residuals whole."""

    def summary(self) -> dict[str, float]:
        """Return the numbers that this encoder adds to the state's summary()."""

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint, which is equal on all ranks. Call it between two steps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the encoder that saved the checkpoint."""
