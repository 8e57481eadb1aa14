"""A segment that this process has attached, and the futures of its operations."""

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
    """The result of an operation, which is issued immediately or at the end of its batch."""

    def __init__(self, native: _smb.Future) -> None:
        self._native = native

    def done(self) -> bool:
        """Return True if result() would not block."""
        return self._native.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return the value of a fetch_add, or None. Raises the error of the operation.

        Args:
            timeout: seconds to wait; None: no limit

        Raises TimeoutError if the operation is not done within ``timeout`` seconds; the operation
        continues. Raises ValueError if the operation is not issued yet.
        """
        return self._native.result(timeout)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait as result() does, and return the exception that it would raise, or None.

        Args:
            timeout: seconds to wait; None: no limit
        """
        self._native.wait(timeout)
        try:
            self._native.result()
        except Exception as error:
            return error
        return None


class Segment:
    """Memory of a box, and this process's copy of it (``buffer``).

    ``read`` and ``write`` move bytes between the box and ``buffer``, or another object. This can be
    a C-contiguous NumPy array, a contiguous CPU tensor, or any object with Python's buffer
    protocol. Over shm they make no intermediate copy. They make one over tcp with a ``seal``, and
    over verbs for memory other than ``buffer``. Offsets and sizes are bytes.

    The ``*_async`` forms take the same arguments and return a Future, which keeps the memory alive.
    Until the operation is done, do not change the memory of a write, nor use the memory of a read.
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
        """The key, a number of 128 bits, by which other clients attach."""
        return self._key

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._size

    @property
    def created(self) -> bool:
        """True if this attachment created the segment, which then had only zeros."""
        return self._native.created

    @property
    def read_only(self) -> bool:
        """True if this attachment may only read."""
        return self._native.read_only

    @property
    def buffer(self) -> memoryview:
        """This process's copy of the segment: private memory, zero-filled on first use."""
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

        Writes to the view change the segment in the box. The view may be used after free(); it is
        zero-filled once the key is deleted and the last attachment has ended.
        """
        return memoryview(self._native.view())

    def read(self, offset: int = 0, size: int | None = None, into: Any = None) -> None:
        """Copy from the box to the buffer, at the same offset, or to the beginning of ``into``.

        Args:
            offset: the first byte in the segment
            size: bytes to copy; None: to the end of the segment, or all of ``into``
            into: the memory to fill; None: the buffer
        """
        self._client.read(*self._local(offset, size, into))

    def write(self, offset: int = 0, size: int | None = None, source: Any = None) -> None:
        """Copy from the buffer to the box, at the same offset, or from the beginning of ``source``.

        Args:
            offset: the first byte in the segment
            size: bytes to copy; None: to the end of the segment, or all of ``source``
            source: the memory to copy from; None: the buffer
        """
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

        Concurrent accumulates are never lost.

        Args:
            src: the segment whose elements are added
            dtype: float32, float64, float16, bfloat16, int32 or int64, by name or as NumPy's or
                PyTorch's type
            scale: the factor. Integers need a whole number, else ValueError.
            offset: the first byte in self
            size: bytes of self; None: to the end of self
            source_offset: the first byte in src; None: the element with the same index as in self
            source_dtype: the type of src's elements; None: ``dtype``. bfloat16, float16 and float64
                can be added to float32, and float32 to each of them.
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
        """Compute self = scale * src, converted, element by element, on the box.

        Takes the arguments of ``accumulate``, and drops the old values.

        Args:
            size: bytes of self; None: to the end of self
            source_offset: the first byte in src; None: the element with the same index as in self
            source_dtype: the type of src's elements; None: ``dtype``
        """
        batch = self._client.batch()
        what = src, dtype, scale, offset, size, source_offset, source_dtype
        _wait(batch, self._sum(batch, True, *what))

    def fetch_add(self, offset: int, n: int) -> int:
        """Add ``n`` to the signed 64-bit number at ``offset``, atomically, on the box. Returns the
        value before."""
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
        """Start a fetch_add. The result of the future is the value before."""
        batch = self._client.batch()
        future = batch.fetch_add(self._native, index("offset", offset), int64("n", n))
        return _issue(batch, future)

    def free(self) -> None:
        """End the attachment. Does nothing for a segment that was freed or lost."""
        self._client.free(self._native)

    def delete(self) -> None:
        """Delete the key, so that no client can attach any more, and end the attachment. The last
        attachment frees the memory.

        The attachment ends even if the key cannot be deleted, for example because another client
        has deleted it (NoSuchKey).
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
