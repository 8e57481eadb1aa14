"""Functions of process groups. monitored_barrier and split_group replace functions that
torch.distributed refuses for hbm in some releases. The other functions find a caller's group or
backend, or check a DDP model before its communication hook is registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.native import load

# The number of split_group calls on each group, by its name; equal on all ranks of the group.
_splits: Counter[str] = Counter()


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait for all ranks, and name those that do not come.

    It does the same as torch.distributed.monitored_barrier. That function refuses every backend
    except Gloo up to PyTorch 2.13, and accepts hbm from 2.14 on.

    Args:
        group: an hbm group; None: the default group
        timeout: the time limit of this barrier; None: the group's timeout
        wait_all_ranks: True: name every missing rank; False: name the first one

    Raises:
        DistBackendError: ranks are missing. Every rank raises it, with the same verdict, which
            names these ranks. The first waiting rank that times out decides the verdict; ranks
            that come later raise immediately. If a rank has died or destroyed the group, rank 0
            decides the verdict as soon as it waits or, with `wait_all_ranks`, once all other ranks
            have come. If rank 0 itself has died or destroyed the group, each waiting rank raises
            immediately.
        DistNetworkError: the c10d store is gone.
        ValueError: the group's CPU backend is not hbm.
    """
    backend = hbm_backend(chosen_group(group), "monitored_barrier")
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
    """Split a group into disjoint smaller groups.

    It does the same as torch.distributed.split_group, which in PyTorch 2.13 refuses backends that
    are not part of PyTorch. A rank waits only for the ranks of its own new group.

    Args:
        parent_pg: an hbm group, whose ranks all call split_group; None: the default group
        split_ranks: for each new group, the list of its ranks as numbered in `parent_pg`
        timeout: the timeout of operations in the new groups; None: the timeout of `parent_pg`
        pg_options: torch_hbmcomm.Options for the new groups; None: the options of `parent_pg`
        group_desc: the new groups' description; None: PyTorch's default

    Returns:
        the new group that this rank is in, or None

    Raises:
        ValueError: a rank that is not in the group or is named twice, or a group whose CPU backend
            is not hbm
    """
    parent = chosen_group(parent_pg)
    backend = hbm_backend(parent, "split_group")
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
                backend.name(),
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
    """Form a group of these global ranks. Only these ranks call it.

    REQUIRES: no other group has the name `name`.

    dist.new_group(use_local_synchronization=True) would name the group after the number of groups
    that the calling rank is in. Ranks in different numbers of groups would then use different
    names, and wait for each other until the timeout.
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


def chosen_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group; None means the default one.

    Raises ValueError if there is no default group, TypeError if `group` is not a group.
    """
    chosen = dist.group.WORLD if group is None else group
    if chosen is None:
        raise ValueError("there is no default group; call init_process_group first")
    if not isinstance(chosen, dist.ProcessGroup):
        raise TypeError(
            f"group is a process group that this rank is in, or None, not {type(chosen).__name__}"
        )
    return chosen


def hbm_backend(group: dist.ProcessGroup, needed_for: str) -> Any:
    """Return the group's backend for CPU tensors. Raises ValueError if it is not hbm.

    needed_for: the function that needs hbm, for the error
    """
    backend = cpu_backend(group)
    if not is_hbm(group):
        raise ValueError(
            f'the group\'s CPU backend is {backend.name()}: only groups of "hbm" have {needed_for}'
        )
    return backend


def is_hbm(group: dist.ProcessGroup) -> bool:
    """Return True if the group's backend for CPU tensors is hbm, also if its name is "gloo"."""
    return isinstance(cpu_backend(group), load().ProcessGroupHbm)


def cpu_backend(group: dist.ProcessGroup) -> Any:
    """Return the group's backend for CPU tensors."""
    backend = group._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def check_wrapped(ddp: nn.Module, state: str) -> DistributedDataParallel:
    """Return the model. Raises TypeError if it is not wrapped in DistributedDataParallel.

    state: the class name of the communication hook's state, for the error
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"{state} is for DistributedDataParallel, and this is a {type(ddp).__name__}: wrap the "
            "model first"
        )
    return ddp


def group_of_model(
    ddp: DistributedDataParallel, group: dist.ProcessGroup | None, state: str
) -> dist.ProcessGroup:
    """Return the model's group. It must also be the group of the communication hook's state.

    Args:
        group: the group given to the state; None: the default group
        state: the state's class name, for errors

    Raises:
        TypeError: the model is not wrapped
        ValueError: the model has another group
    """
    check_wrapped(ddp, state)
    if ddp.process_group is not chosen_group(group):
        raise ValueError(
            "the group is not the model's: give DistributedDataParallel(process_group=...) and "
            f"{state} the same one"
        )
    return ddp.process_group


def group_to_report_in(
    group: dist.ProcessGroup | None, ddp: DistributedDataParallel | None
) -> dist.ProcessGroup:
    """Return the group in which one rank's bad argument is published.

    It is the group of the wrapped model `ddp`, because `group` may be the bad argument. If `ddp` is
    not a wrapped model, it is chosen_group(group).
    """
    if isinstance(ddp, DistributedDataParallel):
        return ddp.process_group
    return chosen_group(group)


class HookState:
    """The state of a communication hook, which can be neither copied nor pickled."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, alone or with its "
            "DistributedDataParallel model: the copy would lack the communication hook. Copy or "
            "save the model inside, as in copy.deepcopy(ddp.module) or "
            "torch.save(ddp.module.state_dict(), path); to train the copy, wrap it and register "
            "a hook with a new state. A checkpoint has the state's state_dict()"
        )


def check_no_hook(ddp: DistributedDataParallel) -> None:
    """Raise ValueError when the model has a communication hook already."""
    if ddp._comm_hooks:
        hook, _ = ddp._comm_hooks[0]
        raise ValueError(
            f"the model has a communication hook ({hook.__qualname__}), and DDP takes only one"
        )
