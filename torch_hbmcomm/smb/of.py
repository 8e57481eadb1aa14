"""The boxes of a process group, which it was formed with (torch_hbmcomm.group_boxes)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch_hbmcomm.smb.box import Box

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def of(group: ProcessGroup | None = None) -> Box:
    """The group's first box, or its only one; None means the default group.

    Do not close it: the group does.

    Raises ValueError, as all_of does.
    """
    return all_of(group)[0]


def all_of(group: ProcessGroup | None = None) -> list[Box]:
    """The group's boxes: one for "auto", else in the order of their addresses.

    Raises ValueError for a group that has none, that is not hbm, or that has ended.
    """
    companion = _backend(group).companion
    if companion is None:
        raise ValueError(
            "the group has no memory box: form it, by init_process_group, new_group or "
            'hbmcomm.split_group, with pg_options=hbmcomm.Options(parameter_server="auto"), or '
            'with the address of a box, "smb://host:port"; HBMCOMM_PARAMETER_SERVER sets the '
            "default"
        )
    if companion.closed:
        raise ValueError("the group has ended, and its memory boxes with it: form another one")
    return list(companion.boxes)


def _backend(group: ProcessGroup | None) -> Any:
    torch: Any = sys.modules.get("torch")
    dist: Any = sys.modules.get("torch.distributed")
    chosen = dist.group.WORLD if group is None and dist is not None else group
    if chosen is None:
        raise ValueError("there is no default group: call init_process_group first")
    if not isinstance(chosen, dist.ProcessGroup):
        raise ValueError(f"{chosen!r} is no process group that this rank is in")
    backend = chosen._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # by TORCH_DISTRIBUTED_DEBUG=DETAIL
    if backend.name() != "hbm":
        raise ValueError(
            f'the group\'s CPU backend is {backend.name()}: only groups of "hbm" have memory boxes'
        )
    return backend
