"""Closes what is still open when the interpreter ends: threads must not outlive it, nor a box's
socket file the box."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class _Closes(Protocol):
    def close(self) -> None: ...


_makers: weakref.WeakKeyDictionary[_Closes, int] = weakref.WeakKeyDictionary()  # process ids


def at_exit(one: _Closes) -> None:
    _makers[one] = os.getpid()


@atexit.register
def _close_all() -> None:
    for one, maker in list(_makers.items()):
        if maker == os.getpid():  # what a forked child has from its parent is the parent's
            one.close()
