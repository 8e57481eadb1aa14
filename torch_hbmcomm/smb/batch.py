"""Operations that are sent together."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch_hbmcomm import _smb
from torch_hbmcomm.smb.segment import Future, Segment
from torch_hbmcomm.smb.values import index, int64


class Batch:
    """Collects operations in a ``with`` block, which ends when all are done.

    The operations are sent together, in order. Operations on the same bytes take effect in this
    order. The block raises the first failure. If an exception leaves the block, nothing is sent,
    and every future fails. No future can be awaited before the end of the block. The methods have
    the arguments of Segment's methods, after the segment.

    A batch saves network latencies; over shm it saves the latencies of fetch_add and sums. Short
    reads and writes over shm are plain copies, which are no faster in a batch.
    """

    def __init__(self, native: _smb.Batch) -> None:
        self._collects: _smb.Batch | None = native
        self._futures: list[_smb.Future] = []

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        native = self._native
        self._collects = None
        if kind is not None:
            return  # the native batch fails its operations when it is destroyed
        native.issue_and_wait_next()
        _smb.wait_all(self._futures)

    def read(
        self, segment: Segment, offset: int = 0, size: int | None = None, into: Any = None
    ) -> Future:
        """Add a read."""
        return self._keep(self._native.read(*segment._local(offset, size, into)))

    def write(
        self, segment: Segment, offset: int = 0, size: int | None = None, source: Any = None
    ) -> Future:
        """Add a write."""
        return self._keep(self._native.write(*segment._local(offset, size, source)))

    def accumulate(
        self,
        segment: Segment,
        src: Segment,
        dtype: Any,
        scale: float = 1.0,
        offset: int = 0,
        size: int | None = None,
        source_offset: int | None = None,
        source_dtype: Any = None,
    ) -> Future:
        """Add an accumulate."""
        what = src, dtype, scale, offset, size, source_offset, source_dtype
        return self._keep(segment._sum(self._native, False, *what))

    def assign(
        self,
        segment: Segment,
        src: Segment,
        dtype: Any,
        scale: float = 1.0,
        offset: int = 0,
        size: int | None = None,
        source_offset: int | None = None,
        source_dtype: Any = None,
    ) -> Future:
        """Add an assign."""
        what = src, dtype, scale, offset, size, source_offset, source_dtype
        return self._keep(segment._sum(self._native, True, *what))

    def fetch_add(self, segment: Segment, offset: int, n: int) -> Future:
        """Add a fetch_add. The result of the future is the value before."""
        return self._keep(
            self._native.fetch_add(segment._native, index("offset", offset), int64("n", n))
        )

    @property
    def _native(self) -> _smb.Batch:
        if self._collects is None:
            raise ValueError("the batch is over; box.batch() makes another one")
        return self._collects

    def _keep(self, native: _smb.Future) -> Future:
        self._futures.append(native)
        return Future(native)
