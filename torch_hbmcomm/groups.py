"""monitored_barrier and split_group, which torch.distributed offers for its own backends only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

_splits: Counter[str] = Counter()  # of the group of that name, in which all ranks split it


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait for all ranks, and name those that do not come.

    It is torch.distributed.monitored_barrier, which in PyTorch 2.13 refuses every backend but Gloo.

    Args:
        group: an hbm group; None means the default group
        timeout: None means the group's own
        wait_all_ranks: name every missing rank, instead of the first

    Raises:
        DistBackendError: on every rank that came, naming the missing ones
        ValueError: the group's CPU backend is not hbm
    """
    _, backend = _backend(group, "monitored_barrier")
    backend.monitored_barrier(
        timeout=backend.options._timeout if timeout is None else timeout,
        wait_all_ranks=wait_all_ranks,
    )


def split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] = (),
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> dist.ProcessGroup | None:
    """Split a group into disjoint smaller ones.

    It is torch.distributed.split_group, which in PyTorch 2.13 refuses backends outside of PyTorch.
    Only the ranks of one new group wait for each other.

    Args:
        parent_pg: an hbm group, every rank of which calls; None means the default group
        split_ranks: for each new group, its ranks in `parent_pg`
        timeout: of the new groups; None means that of `parent_pg`
        pg_options: torch_hbmcomm.Options of the new groups; None means those of `parent_pg`
        group_desc: of the new groups

    Returns:
        the new group that this rank is in, or None

    Raises:
        ValueError: a rank that is not in the group or is named twice
    """
    parent, backend = _backend(parent_pg, "split_group")
    named = [rank for part in split_ranks for rank in part]
    if len(set(named)) != len(named) or any(not 0 <= rank < backend.size() for rank in named):
        raise ValueError(
            f"split_group: split_ranks={[list(part) for part in split_ranks]} must name ranks of "
            f"the group (0 to {backend.size() - 1}), each at most once"
        )
    _splits[parent.group_name] += 1
    for part in split_ranks:
        if backend.rank() in part:
            return form_group(
                [dist.get_global_rank(parent, rank) for rank in part],
                f"{parent.group_name}/split-{_splits[parent.group_name]}/{part[0]}",
                "hbm",
                backend.options._timeout if timeout is None else timeout,
                backend.options if pg_options is None else pg_options,
                group_desc,
            )
    return None


def form_group(
    ranks: Sequence[int],
    name: str,
    backend: str,
    timeout: timedelta,
    options: Any,
    description: str | None,
) -> dist.ProcessGroup:
    """Form a group of these global ranks, with a name that no other group has; only they call.

    dist.new_group(use_local_synchronization=True) names a group after the number of groups that a
    rank is in, and ranks that are in different numbers of groups wait for ever.
    """
    made: dist.ProcessGroup
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        distributed_c10d._get_default_store(),
        GroupName(name),
        backend_options=options,
        timeout=timeout,
        group_desc=description,
    )
    global_to_group = {rank: number for number, rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[made] = global_to_group
    return made


def _backend(group: dist.ProcessGroup | None, function: str) -> tuple[dist.ProcessGroup, Any]:
    """Return the group (None means the default one) and its backend, which must be hbm."""
    chosen = dist.group.WORLD if group is None else group
    if chosen is None:
        raise ValueError(f"{function}: there is no default group; call init_process_group first")
    backend = chosen._get_backend(torch.device("cpu"))
    if backend.name() != "hbm":
        raise ValueError(f"{function}: the group's CPU backend is {backend.name()}, not hbm")
    return chosen, backend
