"""Stops the native threads before the interpreter is finalised (docs/design/process-end.md)."""

from __future__ import annotations

import atexit
from operator import methodcaller
from types import ModuleType

loaded: list[ModuleType] = []  # native modules, which load() appends before it looks at `ended`
ended: list[bool] = []  # not empty: the interpreter is about to be finalised


def register() -> None:
    """At exit fill `ended`, and then stop the threads of each module of `loaded`.

    Handlers that were registered earlier run later, so this is called when torch is imported. The
    handlers are functions of C: a pending Ctrl-C would end a function of Python before its first
    line.
    """
    atexit.register(list, map(methodcaller("end_interpreter", here=True), loaded))
    atexit.register(ended.append, True)
