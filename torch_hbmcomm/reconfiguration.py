"""Forms the default group again, when processes have died or others join.

Each process takes a handle, the program passes the handles on, and every member of the next group
calls reconfigure() with the same handles. It works on every release of PyTorch, and for every group
of init_process_group("hbm"). PyTorch 2.14 and later also have torch.distributed._reconfigure, which
keeps the ProcessGroup object; docs/when-processes-die.md compares the two.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from torch_hbmcomm.backend import check_options
from torch_hbmcomm.native import load

_one_call = threading.Lock()  # held by the thread that reconfigures


def _renew_lock() -> None:
    global _one_call
    _one_call = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # the child has only the forking thread


class _GroupCount(int):
    """PyTorch's count of groups, which names them. The text of this one has the uuid too.

    So no group has the name of a group before the reconfiguration. A DeviceMesh keeps only the
    names of its groups, and would communicate over later groups of the same names.
    """

    uuid = 0

    def __str__(self) -> str:
        return f"{self.uuid}:{int(self)}"

    def __add__(self, more: int) -> _GroupCount:
        return _group_count(self.uuid, int(self) + more)


def _group_count(uuid: int, count: int) -> _GroupCount:
    made = _GroupCount(count)
    made.uuid = uuid
    return made


@cache
def _reconfiguration() -> Any:
    return load().Reconfiguration()


def reconfigure_handle() -> str:
    """Return this process' handle for the next group, one line of text.

    The handle has all that other processes need to meet this one, on this machine or another. Pass
    it on to them, for example through a file or a socket. A handle serves for one group. Once
    reconfigure() has formed a group with it, this function returns another handle.

    Keep handles from strangers: a process that has a handle can disturb the meeting of its members.

    Raises:
        RuntimeError: this process cannot serve the store in which the members meet
        ValueError: a wrong HBMCOMM_PORTS or HBMCOMM_INTERFACES
    """
    handle: str = _reconfiguration().handle()
    return handle


def reconfigure(
    uuid: int,
    handles: Sequence[str] | AbstractSet[str],
    timeout: timedelta = default_pg_timeout,
    pg_options: Any = None,
) -> None:
    """Form the default group of the processes whose handles are given. All of them call it.

    Once all members have met, it aborts every group of this process, and calls
    init_process_group("hbm") for the members. So works in flight fail, and the program makes its
    other groups, its DDP models and its meshes again. If the members do not meet, the groups stay
    as they were. If a member fails later, the call raises on all members, no group is left, and
    another call with another uuid may form it.

    Args:
        uuid: the number of this attempt, equal on all members. A process uses each number once. The
            names of the new groups begin with it: attempt 2 forms the group "2:0".
        handles: the members' handles, one of them this process' present one (reconfigure_handle).
            In a list each member's rank is its index. In a set hbm chooses the order: the ranks of
            one machine have consecutive numbers.
        timeout: the time limit of this call, and of the operations of the new group
        pg_options: torch_hbmcomm.Options for the new group. None: as the environment variables say

    Raises:
        TypeError: an argument of another type, for example one text in the place of a list or a set
        ValueError: a text that is no handle, a handle that is named twice, handles without this
            process' present one, or a uuid of more than 64 bits
        RuntimeError: another thread of this process is reconfiguring
        DistBackendError: a member has used the uuid before, has died, has failed, or has not come
            before the timeout; or the members came with different handles. The error names that
            member.
        DistNetworkError: the first member cannot be reached
    """
    if isinstance(handles, str | bytes):
        raise TypeError("reconfigure: handles must be a list or a set of texts, not one text")
    if not isinstance(handles, Sequence | AbstractSet):  # an iterator, for example, has no order
        raise TypeError(f"reconfigure: handles must be a list or a set, not {_type_name(handles)}")
    for handle in handles:
        if not isinstance(handle, str | bytes):  # TCPStore.get returns bytes
            raise TypeError(f"reconfigure: each handle must be a text, not {_type_name(handle)}")
    try:
        uuid = operator.index(uuid)
    except TypeError:
        raise TypeError(f"reconfigure: uuid must be an integer, not {_type_name(uuid)}") from None
    if not -(2**63) <= uuid < 2**63:
        raise ValueError(f"reconfigure: uuid {uuid} does not fit into 64 bits")
    if not isinstance(timeout, timedelta):
        raise TypeError(f"reconfigure: timeout must be a timedelta, not {_type_name(timeout)}")
    check_options(pg_options)
    if not _one_call.acquire(blocking=False):
        raise RuntimeError(
            "reconfigure: another thread of this process is reconfiguring; let one thread call it"
        )
    try:
        _form(uuid, handles, timeout, pg_options)
    finally:
        _one_call.release()


def _type_name(value: object) -> str:
    return type(value).__qualname__


def _form(
    uuid: int,
    handles: Sequence[str] | AbstractSet[str],
    timeout: timedelta,
    pg_options: Any,
) -> None:
    reconfiguration = _reconfiguration()
    following = reconfiguration.meet(list(handles), isinstance(handles, Sequence), uuid, timeout)
    try:
        if dist.is_initialized():
            distributed_c10d._abort_process_group()
        # The names of groups are part of the keys in the store. After a failed call the
        # count is higher than a newcomer's.
        distributed_c10d._world.group_count = _group_count(uuid, 0)
        dist.init_process_group(
            "hbm",
            store=following.store,
            rank=following.rank,
            world_size=following.size,
            timeout=timeout,
            pg_options=pg_options,
        )
    except BaseException as error:
        following.fail(f"rank {following.rank} cannot form the group: {error}")
        raise
    try:
        reconfiguration.conclude(following)
    except BaseException:
        distributed_c10d._abort_process_group()
        raise
