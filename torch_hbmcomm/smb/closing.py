"""Closes what is still open when the interpreter ends: threads must not outlive it, nor a box's
socket file the box."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class _Closes(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closes] = weakref.WeakSet()
_owner = os.getpid()


def at_exit(one: _Closes) -> None:
    _open.add(one)


@atexit.register
def _close_all() -> None:
    if os.getpid() != _owner:
        return  # a forked child has nothing of its own to close
    for one in list(_open):
        one.close()
