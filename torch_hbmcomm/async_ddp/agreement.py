"""Checks of async_hook's model, and of the settings that must be equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.groups import check_no_hook
from torch_hbmcomm.tensors import check_dense, check_fills_memory

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AsyncHookConfig:
    """The arguments of AsyncState that must be equal on all ranks, and the number of boxes."""

    resync_every: int | None
    source: int
    boxes: int

    def check(self, ranks: int) -> None:
        """Raise ValueError for a setting that does not fit a group of `ranks` ranks."""
        if self.resync_every is not None and self.resync_every < 1:
            raise ValueError(
                f"resync_every is at least 1, not {self.resync_every}; None: no resync"
            )
        if not 0 <= self.source < ranks:
            raise ValueError(f"source is a rank of the group, 0 to {ranks - 1}, not {self.source}")


def trained(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients DDP hands to hooks, by their names in the module.

    Raises ValueError and TypeError for settings or tensors that async_hook does not support.
    """
    if ddp.find_unused_parameters:
        raise ValueError(
            "find_unused_parameters=True lets all ranks wait for each other in every iteration, "
            "and discards a hook's results for unused parameters: leave it out"
        )
    if ddp.broadcast_buffers:
        raise ValueError(
            "broadcast_buffers=True lets all ranks wait for rank 0 in every iteration: give "
            "DistributedDataParallel(broadcast_buffers=False)"
        )
    check_no_hook(ddp)
    check_dense(ddp.module)
    found = {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }
    for name, parameter in found.items():
        if parameter.dtype not in _FLOATS:
            raise ValueError(
                f"the gradient of {name} is {parameter.dtype}: totals are kept of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _FLOATS)}"
            )
        check_fills_memory("parameter", name, parameter, any_device=True)
    return found


def check_equal(configs: list[AsyncHookConfig]) -> None:
    """Raise ValueError if the configs, one of each rank, are not equal."""
    for rank, other in enumerate(configs):
        if other != configs[0]:
            raise ValueError(
                f"AsyncState has {configs[0]} on rank 0 and {other} on rank {rank}: it must be the "
                "same on every rank"
            )
