"""Closes what is still open at the end of a with block, or when the interpreter ends: threads must
not outlive it, nor a box's socket file the box."""

from __future__ import annotations

import atexit
import os
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

_Self = TypeVar("_Self")


class Closing(ABC):
    """What a with block closes."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_makers: weakref.WeakKeyDictionary[Closing, int] = weakref.WeakKeyDictionary()  # process ids


def at_exit(one: Closing) -> None:
    _makers[one] = os.getpid()


@atexit.register
def _close_all() -> None:
    for one, maker in list(_makers.items()):
        if maker == os.getpid():  # what a forked child has from its parent is the parent's
            one.close()
