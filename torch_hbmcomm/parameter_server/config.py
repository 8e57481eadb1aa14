"""The configuration of a parameter server: a class for each mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.parameter_server.rules import Rule

_OF_THE_HOOK = (
    "drop.wire_dtype and drop.skip_update are for layer_drop_hook, and a parameter server has no "
    "use for them: leave both at None"
)

BUFFERS = ("shared", "local")


@dataclass(frozen=True)
class AsyncConfig:
    """Arguments of ParameterServer(mode="async"), which explains them.

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
    drop: LayerDrop | None

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
    def manifest_terms(self) -> dict[str, Any]:
        """Return what all workers of a job have to agree on, as their manifest has it."""
        return {
            "rule": repr(self.rule),
            "staleness": self.staleness,
            "drop": repr(self.drop),
        }

    @property
    def transfer_name(self) -> str | None:
        """The name of `transfer`, as a box knows it."""
        return None if self.transfer is None else str(self.transfer).removeprefix("torch.")

    @property
    def exchanges_ahead(self) -> int | None:
        """The number of exchanges that a worker may be ahead: an overlapped one is a step
        behind."""
        if self.staleness is None or not self.overlap:
            return self.staleness
        return self.staleness - 1

    def _check_drop(self, drop: LayerDrop) -> None:
        if not isinstance(drop, LayerDrop):
            raise TypeError(f"drop is a LayerDrop or None, not {drop!r}")
        if self.rule.reads_first:
            raise ValueError(
                f"drop does not go with rule {self.rule!r}, which sends a part of the distance to "
                "the weights, not what the optimizer changed: of a layer that is dropped nothing "
                "would add up and be made up for later. Use Downpour, or leave drop out"
            )
        if (drop.wire_dtype, drop.skip_update) != (None, None):
            raise ValueError(_OF_THE_HOOK)
        if drop.cache_dtype is not None:
            raise ValueError(
                f'drop.cache_dtype={drop.cache_dtype} has no meaning in mode="async": there is no '
                "cache, what is not sent waits in the model itself; leave it at None"
            )


@dataclass(frozen=True)
class SyncConfig:
    """Arguments of ParameterServer(mode="sync"), which explains them; the same on every rank.

    It refuses nothing: agree() tells all ranks together of a problem() on any (sync_agreement.py).
    """

    server: int = 0
    dedicated: bool = False
    buffers: str = "shared"
    push_every: int = 1
    drop: LayerDrop | None = None

    def problem(self, ranks: int) -> str | None:
        """Say what is wrong with it in a group of so many ranks; None: nothing."""
        if not 0 <= self.server < ranks:
            return f"server={self.server} is no rank of the group, which has ranks 0 to {ranks - 1}"
        if self.dedicated and ranks == 1:
            return "dedicated=True leaves a group of 1 rank no worker; start 2 ranks or more"
        if self.buffers not in BUFFERS:
            return f"buffers={self.buffers!r} is none of {', '.join(BUFFERS)}"
        if self.push_every < 1:
            return f"push_every={self.push_every}; it is a number of steps, at least 1"
        if not isinstance(self.drop, LayerDrop | None):
            return f"drop={self.drop!r} is no hbmcomm.LayerDrop"
        if self.drop is not None and (self.drop.wire_dtype, self.drop.skip_update) != (None, None):
            return _OF_THE_HOOK
        return None
