"""Objects that a with block closes, or else the end of the interpreter: threads must not outlive
it, nor a box's socket file the box."""

from __future__ import annotations

import atexit
import os
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

_Self = TypeVar("_Self")


class Closeable(ABC):
    """Closed at the end of a with block."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Does nothing the second time."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_makers: weakref.WeakKeyDictionary[Closeable, int] = weakref.WeakKeyDictionary()  # process ids


def close_at_exit(one: Closeable) -> None:
    """Have this process close it at the latest when the interpreter ends."""
    _makers[one] = os.getpid()


@atexit.register
def _close_all() -> None:
    """Close the newest first: it may use older ones, as a thread uses its boxes."""
    for one, maker in reversed(list(_makers.items())):
        if maker == os.getpid():  # not what a forked child has inherited
            one.close()
