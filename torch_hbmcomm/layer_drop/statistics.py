"""What dropping saves, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from torch_hbmcomm.layer_drop.bucket import Plan


@dataclass
class _Counts:
    gradient_bytes: int = 0
    sent_bytes: int = 0
    elements: int = 0
    sent_elements: int = 0


@dataclass
class Statistics:
    """Of one rank. A step's counts become part of the totals by end_step()."""

    steps: int = 0
    refused_steps: int = 0
    layers: int = 0
    sent_layers: int = 0
    overhead: int = 0  # bytes that the decisions of the step took
    _total: _Counts = field(default_factory=_Counts)
    _step: _Counts = field(default_factory=_Counts)
    _since: _Counts = field(default_factory=_Counts)  # the last line

    def begin_step(self) -> None:
        self.layers = self.sent_layers = self.overhead = 0
        self._step = _Counts()

    def count_all(self, plan: Plan, buffer: torch.Tensor) -> None:
        """Everything was sent, undecided."""
        self.layers += len(plan.layers)
        self.sent_layers += len(plan.layers)
        self._step.gradient_bytes += buffer.nbytes
        self._step.sent_bytes += buffer.nbytes
        self._step.elements += buffer.numel()
        self._step.sent_elements += buffer.numel()

    def count(
        self, plan: Plan, sent: Sequence[bool], buffer: torch.Tensor, told: torch.Tensor
    ) -> None:
        """told: by each rank to all others, to decide."""
        gone = [layer for layer, goes in zip(plan.layers, sent, strict=True) if goes]
        self.layers += len(plan.layers)
        self.sent_layers += len(gone)
        self.overhead += told.nbytes
        self._step.gradient_bytes += buffer.nbytes
        self._step.sent_bytes += told.nbytes + sum(layer.nbytes for layer in gone)
        self._step.elements += buffer.numel()
        self._step.sent_elements += sum(layer.numel for layer in gone)

    def end_step(self) -> None:
        self.steps += 1
        for name, value in asdict(self._step).items():
            for counts in (self._total, self._since):
                setattr(counts, name, getattr(counts, name) + value)

    def refuse_step(self) -> None:
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
        """Of the steps since the last one."""
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
