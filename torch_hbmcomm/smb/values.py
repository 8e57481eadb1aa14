"""Converts keys, element types and sizes of users into arguments of the native module."""

from __future__ import annotations

import hashlib
import operator
import os
import re
from typing import Any

from torch_hbmcomm.sizes import parse_bytes

Halves = tuple[int, int]  # the high and the low 64 bits of a key

_HALF = 64
_MOST = (1 << 2 * _HALF) - 1
_END = 1 << 63  # addresses and signed 64-bit numbers are less


def key_of(key: int | str) -> int:
    """Return the number of 128 bits that a key stands for.

    An integer of 1 to 2**128 - 1 is the number itself. Text of 32 hexadecimal digits is that
    number. Any other text is a name, and the number is the name's BLAKE2b hash.
    """
    if isinstance(key, str):
        if not key:
            raise ValueError("a key's name has at least one character")
        if re.fullmatch(r"[0-9a-fA-F]{32}", key):
            number = int(key, 16)
        else:
            number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "big")
    else:
        number = operator.index(key)
    if not 0 < number <= _MOST:
        raise ValueError(f"a key is a number of 1 to 2**128 - 1, not {key!r}")
    return number


def halves(key: int | str) -> Halves:
    """Return the native form of a key."""
    number = key_of(key)
    return number >> _HALF, number & ((1 << _HALF) - 1)


def joined(key: Halves) -> int:
    """Return the number of a key in its native form."""
    return key[0] << _HALF | key[1]


def dtype_name(dtype: Any) -> str:
    """Return ``"float32"`` for itself, ``numpy.float32``, ``numpy.dtype("float32")`` or
    ``torch.float32``.

    The native module checks that a box can add elements of the type.
    """
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = dtype.__name__
    else:
        name = getattr(dtype, "name", None) or str(dtype)
    return name.removeprefix("torch.")


def bytes_of(size: int | str) -> int:
    """Return the bytes of ``4096`` or ``"64KiB"``. Raises ValueError outside of 1 to 2**63 - 1."""
    count = parse_bytes(size) if isinstance(size, str) else operator.index(size)
    if not 0 < count < _END:
        raise ValueError(f"a size is a positive number of bytes, less than 2**63, not {count}")
    return count


def seal_option(given: bool | None) -> bool:
    """Return ``given``, or for None the value of HBMCOMM_BOX_SEAL, which is True by default.

    Raises ValueError if the variable is not 0 or 1.
    """
    if given is not None:
        return given
    text = os.environ.get("HBMCOMM_BOX_SEAL", "") or "1"
    if text not in ("0", "1"):
        raise ValueError(f"HBMCOMM_BOX_SEAL is 0 or 1, not {text!r}")
    return text == "1"


def index(name: str, value: int) -> int:
    """Return an offset or a size. Raises ValueError outside of 0 to 2**63 - 1."""
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"{name} is not negative: {number}")
    if number >= _END:
        raise ValueError(f"{name} is less than 2**63: {number}")
    return number


def int64(name: str, value: int) -> int:
    """Return a signed number of 64 bits. Raises ValueError outside of -2**63 to 2**63 - 1."""
    number = operator.index(value)
    if not -_END <= number < _END:
        raise ValueError(f"{name} is a signed number of 64 bits, -2**63 to 2**63 - 1: {number}")
    return number


def scale_of(dtype: str, scale: float) -> float:
    """Return the factor of an accumulate. Raises ValueError if elements are integers, and the
    factor is no whole number."""
    factor = float(scale)
    if dtype.startswith("int") and not (factor.is_integer() and factor == scale):
        raise ValueError(f"an accumulate of {dtype} takes a whole number as its scale, not {scale}")
    return factor


def readable(stats: dict[str, Any]) -> dict[str, Any]:
    """Convert keys into numbers, and sessions into hexadecimal digits, in place."""
    for row in stats["segment_table"]:
        row["key"] = joined(row["key"])
    for row in stats["client_table"]:
        row["session"] = f"{joined(row['session']):032x}"
    return stats
