"""A segment of a box, as one process has attached it, and the futures of its operations."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, Any

from torch_hbmcomm import _smb
from torch_hbmcomm.smb.values import dtype_name, index, int64, joined, scale_of

if TYPE_CHECKING:
    import numpy as np
    import torch


class Future:
    """An operation that has been issued, or will be at the end of its batch."""

    def __init__(self, native: _smb.Future) -> None:
        self._native = native

    def done(self) -> bool:
        """Whether result() would return or raise at once."""
        return self._native.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return fetch_add's value or None, or raise what the operation failed with.

        Raises TimeoutError when it is not done within ``timeout`` seconds; it goes on then.
        Raises ValueError when it is not issued yet, or never was.
        """
        return self._native.result(timeout)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait as result() does, and return what it would raise."""
        self._native.wait(timeout)
        try:
            self._native.result()
        except Exception as error:
            return error
        return None


class Segment:
    """Memory of a box, and this process's copy of it (``buffer``).

    ``read`` and ``write`` move bytes between the box and the copy, or an array or tensor that is
    given instead: a C-contiguous NumPy array, a contiguous CPU tensor, or any object with Python's
    buffer protocol. Nothing is copied on the way. Offsets and sizes are bytes; a size of None
    reaches to the end.

    The ``*_async`` forms return a Future. Until it is done its memory must not change (write), nor
    be looked at (read); it is kept alive.
    """

    def __init__(self, client: _smb.Client, native: _smb.Segment) -> None:
        self._client = client
        self._native = native
        self._key = joined(native.key)
        self._size = native.size
        self._making = threading.Lock()
        self._buffer: memoryview | None = None
        self._registered: _smb.RegisteredBuffer | None = None

    def __repr__(self) -> str:
        return f"<Segment {self._key:032x}, {self._size} bytes>"

    @property
    def key(self) -> int:
        """The number of 128 bits by which others attach to it."""
        return self._key

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._size

    @property
    def created(self) -> bool:
        """Whether it was made by this attachment, and was full of zeros."""
        return self._native.created

    @property
    def read_only(self) -> bool:
        """Whether this attachment may only read."""
        return self._native.read_only

    @property
    def buffer(self) -> memoryview:
        """This process's copy of the segment: memory of its own, made on first use, of zeros."""
        with self._making:
            if self._buffer is None:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._buffer = memoryview(mmap.mmap(-1, self._size, flags=flags))
                self._registered = self._client.register_memory(self._buffer)
            return self._buffer

    def numpy(self, dtype: Any = "uint8") -> np.ndarray[Any, Any]:
        """Return the buffer as a NumPy array of one dimension."""
        import numpy as np

        return np.frombuffer(self.buffer, dtype if isinstance(dtype, type) else dtype_name(dtype))

    def tensor(self, dtype: Any = "uint8") -> torch.Tensor:
        """Return the buffer as a PyTorch tensor of one dimension."""
        import torch

        return torch.frombuffer(self.buffer, dtype=getattr(torch, dtype_name(dtype)))

    def view(self) -> memoryview:
        """Return the segment itself, without a copy. Raises ValueError unless the transport is shm.

        What is written here is written in the box. The view may be used after free(); once the
        segment's key is deleted and its last attachment has ended, it is full of zeros.
        """
        return memoryview(self._native.view())

    def read(self, offset: int = 0, size: int | None = None, into: Any = None) -> None:
        """Copy from the box to the buffer, at the same offset; or to the beginning of ``into``, as
        much as it holds if no size is given."""
        self._client.read(*self._local(offset, size, into))

    def write(self, offset: int = 0, size: int | None = None, source: Any = None) -> None:
        """Copy from the buffer to the box, at the same offset; or from the beginning of ``source``,
        all of it if no size is given."""
        self._client.write(*self._local(offset, size, source))

    def accumulate(
        self,
        src: Segment,
        dtype: Any,
        scale: float = 1.0,
        offset: int = 0,
        size: int | None = None,
        source_offset: int | None = None,
        source_dtype: Any = None,
    ) -> None:
        """Compute self += scale * src, element by element, on the box.

        ``dtype``: float32, float64, float16, bfloat16, int32 or int64, by name or as NumPy's or
        PyTorch's. ``source_dtype`` None is the same; bfloat16, float16 and float64 can be added to
        float32, and float32 to each of them. For integers the scale is a whole number; others are a
        ValueError.

        ``offset`` and ``size`` are bytes of self. ``source_offset`` None is where src has the
        element that self has at ``offset``. Concurrent accumulates are never lost.
        """
        batch = self._client.batch()
        what = src, dtype, scale, offset, size, source_offset, source_dtype
        _wait(batch, self._sum(batch, False, *what))

    def assign(
        self,
        src: Segment,
        dtype: Any,
        scale: float = 1.0,
        offset: int = 0,
        size: int | None = None,
        source_offset: int | None = None,
        source_dtype: Any = None,
    ) -> None:
        """Compute self = scale * src, converted, element by element, on the box: ``accumulate``
        without the old values."""
        batch = self._client.batch()
        what = src, dtype, scale, offset, size, source_offset, source_dtype
        _wait(batch, self._sum(batch, True, *what))

    def fetch_add(self, offset: int, n: int) -> int:
        """Add to a signed 64-bit cell of the box, atomically. Returns what it was before."""
        batch = self._client.batch()
        future = batch.fetch_add(self._native, index("offset", offset), int64("n", n))
        before: int = _wait(batch, future)
        return before

    def read_async(self, offset: int = 0, size: int | None = None, into: Any = None) -> Future:
        """Start a read."""
        batch = self._client.batch()
        return _issue(batch, batch.read(*self._local(offset, size, into)))

    def write_async(self, offset: int = 0, size: int | None = None, source: Any = None) -> Future:
        """Start a write."""
        batch = self._client.batch()
        return _issue(batch, batch.write(*self._local(offset, size, source)))

    def accumulate_async(
        self,
        src: Segment,
        dtype: Any,
        scale: float = 1.0,
        offset: int = 0,
        size: int | None = None,
        source_offset: int | None = None,
        source_dtype: Any = None,
    ) -> Future:
        """Start an accumulate."""
        batch = self._client.batch()
        what = src, dtype, scale, offset, size, source_offset, source_dtype
        return _issue(batch, self._sum(batch, False, *what))

    def assign_async(
        self,
        src: Segment,
        dtype: Any,
        scale: float = 1.0,
        offset: int = 0,
        size: int | None = None,
        source_offset: int | None = None,
        source_dtype: Any = None,
    ) -> Future:
        """Start an assign."""
        batch = self._client.batch()
        what = src, dtype, scale, offset, size, source_offset, source_dtype
        return _issue(batch, self._sum(batch, True, *what))

    def fetch_add_async(self, offset: int, n: int) -> Future:
        """Start a fetch_add. The future's result is what the cell was before."""
        batch = self._client.batch()
        future = batch.fetch_add(self._native, index("offset", offset), int64("n", n))
        return _issue(batch, future)

    def free(self) -> None:
        """End the attachment. Does nothing for a segment that was freed or lost."""
        self._client.free(self._native)

    def delete(self) -> None:
        """Delete the key, so that nobody can attach any more, and end the attachment. The memory
        is freed with the last attachment.

        The attachment ends also where the key cannot be deleted, as when another client was faster
        (NoSuchKey).
        """
        try:
            self._client.remove(self._native)
        finally:
            self.free()

    def _local(
        self, offset: int, size: int | None, local: Any
    ) -> tuple[_smb.Segment, int, int | None, Any]:
        """Return the arguments of the native read and write."""
        start = index("offset", offset)
        length = None if size is None else index("size", size)
        if local is not None:
            return self._native, start, length, local
        end = self._size if length is None else start + length
        if start > self._size or end > self._size:
            raise ValueError(f"bytes {start} to {end} reach past the end of {self!r}")
        return self._native, start, None, self.buffer[start:end]

    def _sum(
        self,
        batch: _smb.Batch,
        assign: bool,
        src: Segment,
        dtype: Any,
        scale: float,
        offset: int,
        size: int | None,
        source_offset: int | None,
        source_dtype: Any,
    ) -> _smb.Future:
        """Add an accumulate, or an assign, to the batch."""
        if not isinstance(src, Segment):
            raise TypeError(f"the source of a sum is a Segment, not {type(src).__name__}")
        start = index("offset", offset)
        if start > self._size:
            raise ValueError(f"offset {start} is past the end of {self!r}")
        length = self._size - start if size is None else index("size", size)
        source_start = None if source_offset is None else index("source_offset", source_offset)
        name = dtype_name(dtype)
        source_name = name if source_dtype is None else dtype_name(source_dtype)
        factor = scale_of(name, scale)
        types = name, source_name
        return batch.accumulate(
            self._native, src._native, *types, assign, factor, length, start, source_start
        )


def _wait(batch: _smb.Batch, future: _smb.Future) -> Any:
    batch.issue_and_wait_next()
    return future.result()


def _issue(batch: _smb.Batch, future: _smb.Future) -> Future:
    batch.issue()
    return Future(future)
