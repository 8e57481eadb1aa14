"""Objects that are closed at the end of a with block, or at the latest at the end of the
interpreter. So no thread outlives the interpreter, and no socket file outlives its box."""

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
        """Release everything. Does nothing when called again."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


# The objects to close, each with the id of the process that has made it.
_makers: weakref.WeakKeyDictionary[Closeable, int] = weakref.WeakKeyDictionary()


def close_at_exit(one: Closeable) -> None:
    """Close `one` when the interpreter of this process ends, unless it is closed before."""
    _makers[one] = os.getpid()


@atexit.register
def _close_all() -> None:
    """Close the newest objects first, because they may use older objects."""
    for one, maker in reversed(list(_makers.items())):
        if maker == os.getpid():  # not inherited by a forked child
            one.close()
