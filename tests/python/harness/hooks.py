"""DDP models with a communication hook of ours, and the hook's state."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm

Hooked = hbmcomm.LayerDropState | hbmcomm.LowRankState


def layer_drop(
    ddp: DistributedDataParallel,
    *,
    optimizer: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    **settings: Any,
) -> hbmcomm.LayerDropState:
    """Register layer_drop_hook. settings: the arguments of LayerDrop."""
    config = hbmcomm.LayerDrop(**settings)
    state = hbmcomm.LayerDropState(ddp, config, optimizer=optimizer, scaler=scaler)
    ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
    return state


def low_rank(
    ddp: DistributedDataParallel,
    *,
    optimizer: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    **settings: Any,
) -> hbmcomm.LowRankState:
    """Register low_rank_hook. settings: the arguments of LowRank."""
    config = hbmcomm.LowRank(**settings)
    state = hbmcomm.LowRankState(ddp, config, optimizer=optimizer, scaler=scaler)
    ddp.register_comm_hook(state, hbmcomm.low_rank_hook)
    return state


def hooked(ddp: DistributedDataParallel, kind: str, **options: Any) -> Hooked:
    """Register low_rank_hook, or layer_drop_hook with a target. kind: "low_rank" or the target."""
    if kind == "low_rank":
        return low_rank(ddp, **options)
    return layer_drop(ddp, target=kind, **options)
