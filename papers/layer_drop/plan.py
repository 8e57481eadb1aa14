"""The plan of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_hbmcomm.bench.result import check_counts, check_names

NORMS = ("L1", "L2")
WITHOUT_RESIDUALS = "without-residuals"
VARIANTS = (*NORMS, WITHOUT_RESIDUALS)
"""Variants of layer dropping: the norm that is a layer's score (with the paper's rule only), and
residuals that are thrown away."""


@dataclass(frozen=True)
class Plan:
    """A choice of measurements. Raises ValueError if a measurement is impossible.

    ratios: R, the dropped shares of all gradients; 0 is always measured too.
    megabits: rates of the link, each way, in Mbit/s; None: unlimited.
    steps: number of steps with each ratio under DDP over an unlimited link.
    slow_steps: number of steps with each ratio under DDP over a limited link.
    whole_steps: number of steps of a contender that drops nothing.
    rounds: turns of plain DDP and of R = 0, whose difference is small.
    server_steps: most steps with a parameter server.
    more_workers: numbers of workers that send everything, besides 4, in the section server.
    passes: rounds of the contenders in the sections pass and threshold.
    training_megabits: rate of the link in the section training.
    training_steps, optimizers: for the section server-training.
    variants: names in VARIANTS, for the section server-training.
    epochs: for the section training.
    batch: images of a rank in a step of the section training.
    seeds: number, for the sections training and server-training.
    width: channels of the first stage of ResNet-50 (originally 64).
    side: width and height of its images (originally 224).
    """

    sections: Sequence[str]
    ratios: Sequence[float] = (0.5, 0.8, 0.9, 0.95, 0.99)
    megabits: Sequence[int | None] = (1000, None)
    steps: int = 200
    slow_steps: int = 30
    whole_steps: int = 3
    rounds: int = 3
    server_steps: int = 60
    more_workers: Sequence[int] = (2, 8)
    passes: int = 7
    training_megabits: int = 300
    training_steps: int = 400
    optimizers: Sequence[str] = ("SGD", "momentum")
    variants: Sequence[str] = ()
    epochs: int = 12
    batch: int = 8
    seeds: int = 3
    width: int = 64
    side: int = 224

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            if not 0 < ratio < 1:
                raise ValueError(f"a ratio is between 0 and 1, not {ratio:g}; 0 is always measured")
        counts = (
            *("steps", "slow_steps", "whole_steps", "rounds", "server_steps", "passes"),
            *("training_megabits", "training_steps", "epochs", "batch", "seeds", "width", "side"),
        )
        check_counts(self, dict.fromkeys(counts, 1))
        check_names("optimizer", self.optimizers, ("SGD", "momentum"))
        if self.variants:
            check_names("variant", self.variants, VARIANTS)
        for rate in self.megabits:
            if rate is not None and rate < 1:
                raise ValueError(f"a link has at least 1 Mbit/s, not {rate}")

    def server_steps_of(self, terms: Mapping[str, Any] | None) -> int:
        """Return the number of steps with LayerDrop(`terms`) that send as many bytes as whole_steps
        without dropping, at most server_steps."""
        kept = 1.0 if terms is None else 1 - float(terms["ratio"])
        return min(self.server_steps, round(self.whole_steps / kept))


QUICK: dict[str, Any] = {
    "ratios": (0.9,),
    "steps": 3,
    "slow_steps": 3,
    "whole_steps": 1,
    "rounds": 1,
    "server_steps": 2,
    "more_workers": (2,),
    "passes": 2,
    "training_megabits": 1000,
    "training_steps": 4,
    "megabits": (1000,),
    "epochs": 1,
    "batch": 64,
    "seeds": 1,
    "width": 8,
    "side": 32,
}
"""Fields of a plan that checks that everything runs."""


def link(megabits: int | None) -> str:
    """Return the name of a link in the tables."""
    if megabits is None:
        return "unlimited"
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits} Mbit/s"
