"""Drops PyTorch's state of a batch of operations if the batch's body raises.

`batch_isend_irecv` runs inside PyTorch's `_coalescing_manager`, which puts the group into a list of
groups that coalesce. If the body raises (for a tag that is not an integer, a sparse tensor, or
Ctrl-C), the group stays in that list. Later collectives on the group then return without calling
the backend.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_hbmcomm.native import load

_NAME = "_coalescing_manager"
_C = load()


@functools.cache
def clear_after_errors() -> None:
    """Make PyTorch's manager drop a batch on a group of hbm if the batch's body raises. Does
    nothing if this release of PyTorch has no such manager."""
    original = getattr(distributed_c10d, _NAME, None)
    if original is None:
        return

    @functools.wraps(original)
    def manager(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        group = call.arguments.get("group") or distributed_c10d._get_default_group()
        backends = _backends(group)
        return _clearing(original, call, group, backends) if backends else original(*args, **kwargs)

    for module in (distributed_c10d, dist):
        if getattr(module, _NAME, None) is original:
            setattr(module, _NAME, manager)


def _backends(group: Any) -> list[Any]:
    found = [group._get_backend(device) for device in group._device_types]
    return [backend for backend in found if isinstance(backend, _C.ProcessGroupHbm)]


@contextlib.contextmanager
def _clearing(
    original: Callable[..., Any], call: inspect.BoundArguments, group: Any, backends: list[Any]
) -> Iterator[Any]:
    batches = distributed_c10d._world.pg_coalesce_state
    nested = group in batches
    try:
        with original(*call.args, **call.kwargs) as manager:
            yield manager
    except BaseException:
        if not nested:
            batches.pop(group, None)
            for backend in backends:
                backend.drop_batch()
        raise
