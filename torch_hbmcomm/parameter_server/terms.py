"""What a user chose about the asynchronous mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_hbmcomm.layer_drop.terms import LayerDrop
from torch_hbmcomm.parameter_server.rules import Rule


@dataclass(frozen=True)
class Terms:
    """As ParameterServer's arguments of these names; `workers` have to join before the first step.

    Raises TypeError, or ValueError for what does not go together.
    """

    rule: Rule
    staleness: int | None
    push_every: int
    transfer: torch.dtype | None
    shared_buffers: bool
    overlap: bool
    workers: int
    keep: bool
    timeout: float
    drop: LayerDrop | None = None

    def __post_init__(self) -> None:
        for name in ("staleness", "push_every", "workers"):
            value = getattr(self, name)
            if not isinstance(value, int) and (name, value) != ("staleness", None):
                raise TypeError(f"{name} is a whole number, not {value!r}")
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness is not negative: {self.staleness}; None is no bound")
        if self.staleness == 0 and self.overlap:
            raise ValueError("with staleness=0 an exchange cannot overlap the next step")
        if self.push_every < 1:
            raise ValueError(f"push_every is at least 1, not {self.push_every}")
        if self.workers < 1:
            raise ValueError(f"workers is at least 1, not {self.workers}")
        if self.timeout <= 0:
            raise ValueError(f"timeout is more than 0 seconds, not {self.timeout}")
        if self.transfer not in (None, torch.bfloat16):
            raise ValueError(f"transfer is None or torch.bfloat16, not {self.transfer}")
        if self.drop is not None:
            self._check_drop(self.drop)

    @property
    def shared(self) -> dict[str, Any]:
        """Those that all workers have to agree on."""
        return {
            "rule": repr(self.rule),
            "staleness": self.staleness,
            "drop": repr(self.drop),
        }

    @property
    def wire(self) -> str | None:
        """transfer, by its name."""
        return None if self.transfer is None else str(self.transfer).removeprefix("torch.")

    def _check_drop(self, drop: LayerDrop) -> None:
        if not isinstance(drop, LayerDrop):
            raise TypeError(f"drop is a LayerDrop or None, not {drop!r}")
        if self.rule.reads_first:
            raise ValueError(
                f"drop does not go with rule {self.rule!r}, which sends a part of the distance to "
                "the weights, not what the optimizer changed: of a layer that is dropped nothing "
                "would add up and be made up for later. Use Downpour, or leave drop out"
            )
        if drop.cache_dtype is not None:
            raise ValueError(
                f'drop.cache_dtype={drop.cache_dtype} has no meaning in mode="async": there is no '
                "cache, what is not sent waits in the model itself; leave it at None"
            )
