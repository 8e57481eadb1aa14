"""Calls functions when this process ends, as an interpreter or as a child of multiprocessing."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.util import Finalize


def at_process_end(function: Callable[[], None]) -> None:
    """Call `function` once when this process ends, and not in a process forked from it.

    A process that os._exit() or a signal ends calls nothing. A child of multiprocessing with the
    start method fork ends by os._exit() too, after it has run the finalizers of multiprocessing.
    """
    process = os.getpid()
    called: list[bool] = []

    def once() -> None:
        if os.getpid() == process and not called:
            called.append(True)
            function()

    atexit.register(once)
    if multiprocessing.parent_process() is not None:
        Finalize(None, once, exitpriority=0)
