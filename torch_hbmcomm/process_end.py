"""Stops the native threads before the interpreter is finalised (docs/design/process-end.md)."""

from __future__ import annotations

import atexit
from operator import methodcaller
from types import ModuleType

loaded: list[ModuleType] = []  # native modules; load() appends one, then checks `ended`
ended: list[bool] = []  # not empty: the interpreter is about to be finalised


def register() -> None:
    """At exit fill `ended`, and then stop the threads of each module of `loaded`.

    Handlers that were registered earlier run later. So register() is called early, when torch is
    imported: the threads still run during handlers that the program registers afterwards. The
    handlers are C functions, because a pending Ctrl-C would end a Python function before its first
    line.
    """
    atexit.register(list, map(methodcaller("end_interpreter", here=True), loaded))
    atexit.register(ended.append, True)
