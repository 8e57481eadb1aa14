"""Stops the native threads before the interpreter is finalised (docs/design/process-end.md)."""

from __future__ import annotations

import atexit
import sys
from typing import Any

ended = False  # the interpreter is about to be finalised


def register() -> None:
    """Stop the threads when the interpreter ends. Handlers that were registered earlier run after
    that, so this is called when torch is imported."""
    atexit.register(_end)


def _end() -> None:
    global ended
    ended = True  # before the look: load() looks here after it has loaded the module
    native: Any = sys.modules.get("torch_hbmcomm._C")
    if native is not None:
        native.end_interpreter(here=True)
