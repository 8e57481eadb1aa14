"""What ranks tell each other before they decide, over a communicator of its own: behind the
survivors of the bucket before, it would wait for them, and nothing would overlap.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torch_hbmcomm.groups import form_group

_CPU = torch.device("cpu")


class Agreement:
    """Made by all ranks of the group together; ends with the process's groups.

    Threads: one at a time, and on every rank the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = _beside(group)
        self._ranks = group.size()

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Of all ranks' values; in place. The same bits everywhere."""
        dist.all_reduce(values, group=self._group)
        return values.div_(self._ranks)

    def check_equal(self, terms: Mapping[str, Any]) -> None:
        """Raises ValueError on every rank when they differ, naming what and where."""
        told: list[Any] = [None] * self._ranks
        dist.all_gather_object(told, dict(terms), group=self._group)
        for rank, other in enumerate(told):
            for name, value in told[0].items():
                if other[name] != value:
                    raise ValueError(
                        f"LayerDropState is told {name}={value!r} on rank 0 and "
                        f"{name}={other[name]!r} on rank {rank}: all ranks decide alike, so it "
                        "must be the same"
                    )


def _beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks."""
    backend = group._get_backend(_CPU)
    names = [f"layer-drop/{secrets.token_hex(8)}"]
    dist.broadcast_object_list(names, group=group, group_src=0)
    return form_group(
        dist.get_process_group_ranks(group),
        names[0],
        backend.name(),
        backend.options._timeout,
        _options(backend),
        "layer drop",
    )


def _options(backend: Any) -> Any:
    """Those of the group, without its memory boxes."""
    if backend.name() != "hbm":
        return None
    from torch_hbmcomm.backend import Options

    own = backend.options
    return Options(memory=own.memory, staging_bytes=own.staging_bytes, parameter_server="")
