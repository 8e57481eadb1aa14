"""Records the requests that a process makes of a memory box: their kinds, threads and ranges."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch_hbmcomm import smb
from torch_hbmcomm.smb.values import joined


@dataclass(frozen=True)
class Request:
    """A request. key: of the segment; None: none. size: None if it has no range"""

    kind: str
    key: int | None
    offset: int
    size: int | None
    thread: threading.Thread


@dataclass
class Log:
    """The requests of recorded boxes, in the order in which they were made.

    before: called in the thread of each request, before the request is made
    """

    requests: list[Request] = field(default_factory=list)
    before: Callable[[Request], None] = lambda _: None

    def note(
        self, kind: str, segment: Any = None, offset: int = 0, size: int | None = None
    ) -> None:
        key = None if segment is None else joined(segment.key)
        request = Request(kind, key, offset, size, threading.current_thread())
        self.before(request)
        self.requests.append(request)

    def take(self) -> list[Request]:
        """Return the requests since the last call."""
        taken, self.requests = self.requests, []
        return taken


def kinds(requests: Sequence[Request]) -> dict[str, int]:
    """Return the number of requests of each kind."""
    return dict(Counter(request.kind for request in requests))


def record(box: smb.Box, log: Log) -> None:
    """Note all further requests of the connection in `log`, whichever thread makes them. Over shm a
    read or a write may be a copy without a request, and is noted too."""
    box._native = cast(Any, _Client(box._native, log))


class _Recorded:
    """Passes on what it does not record."""

    def __init__(self, native: Any, log: Log) -> None:
        self._native = native
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def read(self, segment: Any, offset: int, size: int | None, into: Any) -> Any:
        self._log.note("read", segment, offset, _bytes(size, into))
        return self._native.read(segment, offset, size, into)

    def write(self, segment: Any, offset: int, size: int | None, source: Any) -> Any:
        self._log.note("write", segment, offset, _bytes(size, source))
        return self._native.write(segment, offset, size, source)


class _Client(_Recorded):
    def alloc(self, *what: Any) -> Any:
        self._log.note("alloc")
        return self._native.alloc(*what)

    def exists(self, key: Any) -> Any:
        self._log.note("exists")
        return self._native.exists(key)

    def free(self, segment: Any) -> None:
        self._log.note("free", segment)
        self._native.free(segment)

    def remove(self, segment: Any) -> None:
        self._log.note("remove", segment)
        self._native.remove(segment)

    def batch(self) -> Any:
        return _Batch(self._native.batch(), self._log)


class _Batch(_Recorded):
    def accumulate(self, target: Any, *what: Any) -> Any:
        self._log.note("accumulate", target)
        return self._native.accumulate(target, *what)

    def fetch_add(self, segment: Any, offset: int, n: int) -> Any:
        self._log.note("fetch_add", segment, offset, 8)
        return self._native.fetch_add(segment, offset, n)


def _bytes(size: int | None, memory: Any) -> int:
    return memoryview(memory).nbytes if size is None else size
