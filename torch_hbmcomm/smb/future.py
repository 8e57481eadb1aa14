"""Operations that were issued and may not be done yet."""

from __future__ import annotations

from typing import Any

from torch_hbmcomm import _smb


class Future:
    """An operation that was issued, or will be at the end of its batch."""

    def __init__(self, native: _smb.Future) -> None:
        self._native = native

    def done(self) -> bool:
        return self._native.done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits, and returns fetch_add's value or None, or raises what the operation failed with.

        Raises TimeoutError when it is not done within ``timeout`` seconds; it goes on then.
        Raises ValueError when it is not issued yet, or never was.
        """
        return self._native.result(timeout)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Waits as result() does, and returns what it would raise."""
        self._native.wait(timeout)
        try:
            self._native.result()
        except Exception as error:
            return error
        return None
