"""Counts what dropping saves, for summary(), checkpoints and the log; and warns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from torch_hbmcomm.layer_drop.buckets import BucketLayers
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.decision import Layer


@dataclass
class _Counts:
    gradient_bytes: int = 0
    sent_bytes: int = 0
    elements: int = 0
    sent_elements: int = 0


@dataclass
class Statistics:
    """Counts on one rank. end_step() adds a step's counts to the totals.

    Of the last step: layers, sent_layers; overhead: bytes that its decisions took.
    """

    steps: int = 0
    refused_steps: int = 0
    layers: int = 0
    sent_layers: int = 0
    overhead: int = 0
    _total: _Counts = field(default_factory=_Counts)
    _step: _Counts = field(default_factory=_Counts)
    _since: _Counts = field(default_factory=_Counts)  # line() was called last

    def begin_step(self) -> None:
        self.layers = self.sent_layers = self.overhead = 0
        self._step = _Counts()

    def count_all(self, bucket: BucketLayers, buffer: torch.Tensor) -> None:
        """Count a bucket that was sent whole, without a decision."""
        self.layers += len(bucket.layers)
        self.sent_layers += len(bucket.layers)
        self._step.gradient_bytes += buffer.nbytes
        self._step.sent_bytes += buffer.nbytes
        self._step.elements += buffer.numel()
        self._step.sent_elements += buffer.numel()

    def count(
        self, bucket: BucketLayers, whole: int, elements: int, buffer: torch.Tensor, told: int
    ) -> None:
        """Count a bucket of which a part was sent.

        Args:
            whole: layers that were sent whole
            elements: values that this rank sent of gradients
            buffer: the bucket's gradients
            told: bytes that it sent to decide
        """
        self.layers += len(bucket.layers)
        self.sent_layers += whole
        self.overhead += told
        self._step.gradient_bytes += buffer.nbytes
        self._step.sent_bytes += told + elements * bucket.wire.itemsize
        self._step.elements += buffer.numel()
        self._step.sent_elements += elements

    def end_step(self) -> None:
        """Add the step to the totals."""
        self.steps += 1
        for name, value in asdict(self._step).items():
            for counts in (self._total, self._since):
                setattr(counts, name, getattr(counts, name) + value)

    def refuse_step(self) -> None:
        """Leave out the step, which the scaler skipped."""
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

    def line(self, threshold: float) -> str:
        """Describe the steps since the last call, for the log."""
        since, self._since = self._since, _Counts()
        share = since.sent_bytes / max(since.gradient_bytes, 1)
        return (
            f"step {self.steps}: sent {since.sent_bytes / 1e6:.1f} of "
            f"{since.gradient_bytes / 1e6:.1f} MB ({share:.1%}), in the last step "
            f"{self.sent_layers} of {self.layers} layers; threshold {threshold:.3g}"
        )

    def state_dict(self) -> dict[str, int]:
        return asdict(self._total) | {"steps": self.steps, "refused_steps": self.refused_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        counts = dict(state)
        self.steps, self.refused_steps = counts.pop("steps"), counts.pop("refused_steps")
        self._total, self._since = _Counts(**counts), _Counts()


def warn_if_little_can_be_dropped(config: LayerDrop, layers: Sequence[Layer]) -> None:
    """Warn when a model's layers that are always sent exceed the share that is to be sent."""
    if config.ratio == 0 or config.fixed_threshold is not None:
        return
    always = sum(layer.numel for layer in layers if layer.always)
    total = sum(layer.numel for layer in layers)
    if always > (1 - config.ratio) * total:
        thin = ", one row" if config.target == "low_rank" else ""
        warnings.warn(
            f"layers that are always sent are {always / total:.0%} of the model, and "
            f"ratio={config.ratio} would send {1 - config.ratio:.0%}: they have one "
            f"dimension{thin}, or fewer than min_numel={config.least_numel} elements",
            RuntimeWarning,
            stacklevel=2,
        )


def warn_late(late: Mapping[str, float], ratio: float) -> None:
    """Warn of layers of which more gradients waited than where training goes well."""
    if late:
        named = ", ".join(f"{name} ({count:.0f})" for name, count in late.items())
        warnings.warn(
            f"the loss is at risk: gradients of so many steps waited in {named}, and go whole in "
            f"the next step; a smaller ratio than {ratio}, or a smaller learning rate, lets less "
            "wait",
            RuntimeWarning,
            stacklevel=2,
        )


def warn_not_finite(layers: Sequence[Layer], moments: Sequence[float]) -> None:
    """Warn of layers whose accumulated gradients are not finite."""
    broken = [
        layer.name
        for layer, moment in zip(layers, moments, strict=True)
        if not math.isfinite(moment)
    ]
    if broken:
        warnings.warn(
            f"the accumulated gradient of {', '.join(broken)} is not finite; it was sent at once, "
            "and is in .grad on all ranks",
            RuntimeWarning,
            stacklevel=2,
        )
