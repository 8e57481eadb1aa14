"""Counts the bytes that a hook sends, for summary(), checkpoints and the log. Also has warnings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.config import EncoderConfig
from torch_hbmcomm.error_feedback.encoder import Encoded
from torch_hbmcomm.error_feedback.layers import Layer


@dataclass
class _Counts:
    gradient_bytes: int = 0
    sent_bytes: int = 0
    elements: int = 0
    sent_elements: int = 0


@dataclass
class Statistics:
    """Counts on one rank. end_step() adds a step's counts to the totals.

    layers: number of layers in the last step.
    sent_layers: number of these layers with a parameter that was sent whole.
    """

    steps: int = 0
    refused_steps: int = 0
    layers: int = 0
    sent_layers: int = 0
    _total: _Counts = field(default_factory=_Counts)
    _step: _Counts = field(default_factory=_Counts)
    _since: _Counts = field(default_factory=_Counts)  # since the last line()

    def begin_step(self) -> None:
        self.layers = self.sent_layers = 0
        self._step = _Counts()

    def count(self, bucket: BucketLayers, encoded: Encoded, buffer: torch.Tensor) -> None:
        """Count a bucket. encoded: the part that was sent. buffer: the bucket's gradients."""
        if len(encoded.whole) == len(bucket.counts):
            elements, sent_layers = buffer.numel(), len(bucket.layers)
            sent_bytes = elements * bucket.wire.itemsize
        else:
            whole = set(encoded.whole)
            elements = sum(bucket.counts[index] for index in whole)
            sent_bytes = elements * bucket.wire.itemsize
            if (code := encoded.code) is not None:
                elements += code.elements
                sent_bytes += code.numel * (code.dtype or bucket.wire).itemsize
            sent_layers = sum(not whole.isdisjoint(layer.members) for layer in bucket.layers)
        self.layers += len(bucket.layers)
        self.sent_layers += sent_layers
        self._step.gradient_bytes += buffer.nbytes
        self._step.sent_bytes += encoded.overhead + sent_bytes
        self._step.elements += buffer.numel()
        self._step.sent_elements += elements

    def end_step(self) -> None:
        """Add the step to the totals."""
        self.steps += 1
        for name, value in vars(self._step).items():
            for counts in (self._total, self._since):
                setattr(counts, name, getattr(counts, name) + value)

    def refuse_step(self) -> None:
        """Count a step that the scaler skipped. The totals do not get its counts."""
        self.refused_steps += 1

    def summary(self) -> dict[str, float]:
        total = self._total
        return {
            "steps": self.steps,
            "refused_steps": self.refused_steps,
            "gradient_bytes": total.gradient_bytes,
            "sent_bytes": total.sent_bytes,
            "sent_share": total.sent_elements / max(total.elements, 1),
            "layers": self.layers,
            "sent_layers": self.sent_layers,
        }

    def line(self, more: Mapping[str, float]) -> str:
        """Describe the steps since the last call, for the log. more: numbers to add, by name."""
        since, self._since = self._since, _Counts()
        share = since.sent_bytes / max(since.gradient_bytes, 1)
        return (
            f"step {self.steps}: sent {since.sent_bytes / 1e6:.1f} of "
            f"{since.gradient_bytes / 1e6:.1f} MB ({share:.1%}), in the last step "
            f"{self.sent_layers} of {self.layers} layers"
            + "".join(f"; {name} {value:.3g}" for name, value in more.items())
        )

    def state_dict(self) -> dict[str, int]:
        return asdict(self._total) | {"steps": self.steps, "refused_steps": self.refused_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        counts = dict(state)
        self.steps, self.refused_steps = counts.pop("steps"), counts.pop("refused_steps")
        self._total, self._since = _Counts(**counts), _Counts()


def warn_if_little_can_wait(config: EncoderConfig, layers: Sequence[Layer]) -> None:
    """Warn if the layers that are always sent are a larger part of the model than 1 - ratio."""
    always = sum(layer.numel for layer in layers if layer.always)
    total = sum(layer.numel for layer in layers)
    if config.saves_bytes and always > (1 - config.unsent) * total:
        warnings.warn(
            f"layers that are always sent are {always / total:.0%} of the model, and "
            f"ratio={config.ratio} would send {1 - config.unsent:.0%}: they have "
            f"{config.sent_whole}, or fewer than min_numel={config.least_numel} elements",
            RuntimeWarning,
            stacklevel=4,
        )


def warn_not_finite(layers: Sequence[Layer], sums: Sequence[float]) -> None:
    """Warn if the sum of a layer's accumulated gradients is not finite."""
    broken = [
        layer.name for layer, total in zip(layers, sums, strict=True) if not math.isfinite(total)
    ]
    if broken:
        warnings.warn(
            f"the accumulated gradient of {', '.join(broken)} is not finite; it was sent, and is "
            "in .grad on all ranks",
            RuntimeWarning,
            stacklevel=2,
        )
