"""torch_hbmcomm: the process group "hbm" for CPU training in PyTorch.

    import torch.distributed as dist
    dist.init_process_group("hbm")  # nothing to import: PyTorch finds the installed package

This module holds the names that torch.distributed lacks. Importing it registers the backend, in
case PyTorch does not do so by itself (TORCH_DEVICE_BACKEND_AUTOLOAD=0). If PyTorch is not imported
yet, the backend is registered when PyTorch is imported. The native module is loaded when the first
group is made, or when a name that needs it is used. With HBMCOMM_ALLOCATOR=segment it is loaded
when the backend is registered.

`smb`, the memory box, needs no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_hbmcomm._autoload import register_with_torch
from torch_hbmcomm.version import __version__

if TYPE_CHECKING:
    from torch_hbmcomm import memory as memory
    from torch_hbmcomm import smb as smb
    from torch_hbmcomm.async_ddp import AsyncState as AsyncState
    from torch_hbmcomm.async_ddp import async_hook as async_hook
    from torch_hbmcomm.backend import Options as Options
    from torch_hbmcomm.compression import bf16_hook as bf16_hook
    from torch_hbmcomm.groups import monitored_barrier as monitored_barrier
    from torch_hbmcomm.groups import split_group as split_group
    from torch_hbmcomm.layer_drop import LayerDrop as LayerDrop
    from torch_hbmcomm.layer_drop import LayerDropState as LayerDropState
    from torch_hbmcomm.layer_drop import layer_drop_hook as layer_drop_hook
    from torch_hbmcomm.low_rank import LowRank as LowRank
    from torch_hbmcomm.low_rank import LowRankState as LowRankState
    from torch_hbmcomm.low_rank import low_rank_hook as low_rank_hook
    from torch_hbmcomm.outer_steps import OuterSteps as OuterSteps
    from torch_hbmcomm.parameter_server import ParameterServer as ParameterServer
    from torch_hbmcomm.parameter_server import SyncParameterServer as SyncParameterServer
    from torch_hbmcomm.profiling import profile as profile
    from torch_hbmcomm.reconfiguration import reconfigure as reconfigure
    from torch_hbmcomm.reconfiguration import reconfigure_handle as reconfigure_handle
    from torch_hbmcomm.sharded import replicate_shards as replicate_shards

__all__ = [
    "AsyncState",
    "LayerDrop",
    "LayerDropState",
    "LowRank",
    "LowRankState",
    "Options",
    "OuterSteps",
    "ParameterServer",
    "SyncParameterServer",
    "__version__",
    "async_hook",
    "bf16_hook",
    "layer_drop_hook",
    "low_rank_hook",
    "memory",
    "monitored_barrier",
    "profile",
    "reconfigure",
    "reconfigure_handle",
    "replicate_shards",
    "smb",
    "split_group",
]

_MODULES = {"memory", "smb"}
_HOMES = {
    "AsyncState": "torch_hbmcomm.async_ddp",
    "LayerDrop": "torch_hbmcomm.layer_drop",
    "LayerDropState": "torch_hbmcomm.layer_drop",
    "LowRank": "torch_hbmcomm.low_rank",
    "LowRankState": "torch_hbmcomm.low_rank",
    "Options": "torch_hbmcomm.backend",
    "OuterSteps": "torch_hbmcomm.outer_steps",
    "ParameterServer": "torch_hbmcomm.parameter_server",
    "SyncParameterServer": "torch_hbmcomm.parameter_server",
    "async_hook": "torch_hbmcomm.async_ddp",
    "bf16_hook": "torch_hbmcomm.compression",
    "layer_drop_hook": "torch_hbmcomm.layer_drop",
    "low_rank_hook": "torch_hbmcomm.low_rank",
    "monitored_barrier": "torch_hbmcomm.groups",
    "profile": "torch_hbmcomm.profiling",
    "reconfigure": "torch_hbmcomm.reconfiguration",
    "reconfigure_handle": "torch_hbmcomm.reconfiguration",
    "replicate_shards": "torch_hbmcomm.sharded",
    "split_group": "torch_hbmcomm.groups",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"torch_hbmcomm.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'torch_hbmcomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_with_torch()
