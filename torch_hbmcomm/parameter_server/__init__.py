"""Training with a parameter server: asynchronous on memory boxes, synchronous on collectives.

A class is loaded when its name is first used, because the modules membership, layout, sharding and
exchange need no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_hbmcomm.parameter_server.asynchronous import ParameterServer as ParameterServer
    from torch_hbmcomm.parameter_server.rules import Downpour as Downpour
    from torch_hbmcomm.parameter_server.rules import Elastic as Elastic
    from torch_hbmcomm.parameter_server.rules import Rule as Rule
    from torch_hbmcomm.parameter_server.synchronous import (
        SyncParameterServer as SyncParameterServer,
    )

_HOMES = {
    "Downpour": "rules",
    "Elastic": "rules",
    "ParameterServer": "asynchronous",
    "Rule": "rules",
    "SyncParameterServer": "synchronous",
}
__all__ = ["Downpour", "Elastic", "ParameterServer", "Rule", "SyncParameterServer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
