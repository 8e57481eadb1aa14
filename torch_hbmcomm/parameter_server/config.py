"""The arguments of the two parameter servers, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from torch_hbmcomm.error_feedback.config import AUTO
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.parameter_server.rules import Rule

_BUFFERS = ("shared", "local")


@dataclass(frozen=True)
class AsyncConfig:
    """Arguments of ParameterServer, which explains them.

    Raises TypeError for an argument of a wrong type, and ValueError for an argument that is out of
    its range or does not go with another argument.
    """

    rule: Rule
    staleness: int | None
    push_every: int
    transfer: torch.dtype | None
    buffers: str
    overlap: bool
    workers: int
    keep: bool
    timeout: float
    drop: LayerDrop | None
    aggregate: str | None

    def __post_init__(self) -> None:
        _check_common(self.buffers, self.push_every, self.drop)
        if self.staleness is not None:
            check_whole("staleness", self.staleness)
            if self.staleness < 0:
                raise ValueError(f"staleness is at least 0, not {self.staleness}; None: no bound")
        if self.staleness == 0 and self.overlap:
            raise ValueError("with staleness=0 an exchange cannot overlap the next step")
        check_positive("workers", self.workers)
        if self.timeout <= 0:
            raise ValueError(f"timeout is more than 0 seconds, not {self.timeout}")
        if self.transfer not in (None, torch.bfloat16):
            raise ValueError(f"transfer is None or torch.bfloat16, not {self.transfer}")
        if self.aggregate not in (None, "node"):
            raise ValueError(f'aggregate is None or "node", not {self.aggregate!r}')
        if self.aggregate is not None and self.rule.reads_first:
            raise ValueError(
                f"aggregate does not go with rule {self.rule!r}: with it each process keeps a "
                "model of its own, and the ranks of a node have one together. Use Downpour, or "
                "leave aggregate out"
            )
        if self.drop is not None and self.rule.reads_first:
            raise ValueError(
                f"drop does not go with rule {self.rule!r}: it sends a part of the distance to the "
                "weights, so the changes of a dropped layer would not add up. Use Downpour, or "
                "leave drop out"
            )
        if self.drop is not None and self.drop.cache_dtype is not None:
            raise ValueError(
                f"drop.cache_dtype={self.drop.cache_dtype} has no meaning for ParameterServer: "
                "unsent changes wait in the model itself; leave it at None"
            )

    @property
    def narrows_weights(self) -> bool:
        """True: with `transfer` weights come back as narrow as deltas."""
        return True

    @property
    def manifest_terms(self) -> dict[str, Any]:
        """The settings that must be equal on all workers of a job, for the manifest."""
        return {
            "rule": repr(self.rule),
            "staleness": self.staleness,
            "drop": repr(self.drop),
        }

    @property
    def group_terms(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks of a group, for the manifest."""
        return {**self.manifest_terms, "aggregate": self.aggregate}

    @property
    def node_terms(self) -> dict[str, str]:
        """The settings that must be equal on all ranks of a node that are one worker."""
        return {field.name: repr(getattr(self, field.name)) for field in fields(self)}

    @property
    def transfer_name(self) -> str | None:
        """The name of the dtype `transfer`, as in "bfloat16"."""
        return None if self.transfer is None else str(self.transfer).removeprefix("torch.")

    @property
    def exchanges_ahead(self) -> int | None:
        """The number of exchanges that a worker may be ahead; None: any. With overlap it is one
        less than `staleness`, because an overlapped exchange ends one step later."""
        if self.staleness is None or not self.overlap:
            return self.staleness
        return self.staleness - 1


@dataclass(frozen=True)
class SyncConfig:
    """Arguments of SyncParameterServer, which explains them; the same on every rank."""

    server: int
    dedicated: bool
    buffers: str
    push_every: int
    drop: LayerDrop | None

    def check(self, ranks: int) -> None:
        """Raise TypeError or ValueError for an argument that does not fit a group of `ranks`."""
        _check_common(self.buffers, self.push_every, self.drop)
        check_whole("server", self.server)
        if not 0 <= self.server < ranks:
            raise ValueError(
                f"server={self.server} is no rank of the group, which has ranks 0 to {ranks - 1}"
            )
        if self.dedicated and ranks == 1:
            raise ValueError(
                "dedicated=True leaves a group of 1 rank no worker; start 2 ranks or more"
            )


def _check_common(buffers: str, push_every: int, drop: LayerDrop | None) -> None:
    """Check the arguments that both parameter servers have."""
    if buffers not in _BUFFERS:
        raise ValueError(f'buffers is "shared" or "local", not {buffers!r}')
    check_positive("push_every", push_every)
    if drop is None:
        return
    if not isinstance(drop, LayerDrop):
        raise TypeError(f"drop is a LayerDrop or None, not {drop!r}")
    drop.check()
    if drop.ratio == AUTO:
        raise ValueError(
            'drop.ratio="auto" is for layer_drop_hook: a parameter server does not measure; give a '
            "number"
        )
    if drop.target == "blocks":
        raise ValueError(
            'drop.target="blocks" is for layer_drop_hook: a parameter server sends whole layers, '
            'with target="bytes" or "paper"'
        )
    if (drop.wire_dtype, drop.skip_update) != (None, None):
        raise ValueError(
            "drop.wire_dtype and drop.skip_update are for layer_drop_hook, and a parameter server "
            "has no use for them: leave both at None"
        )


def check_positive(name: str, value: int) -> None:
    """Raise TypeError for a value that is no whole number, ValueError for one below 1."""
    check_whole(name, value)
    if value < 1:
        raise ValueError(f"{name} is at least 1, not {value}")


def check_whole(name: str, value: int) -> None:
    """Raise TypeError for a value that is no whole number."""
    if not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {value!r}")
