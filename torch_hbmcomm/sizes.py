"""Reads byte counts from text, and writes byte counts for people."""

import re

KIB = 1 << 10
MIB = 1 << 20
_UNITS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_bytes(text: str) -> int:
    """Read `"4096"`, `"64KiB"` or `"64 MiB"`. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise ValueError(
            f"{text!r} is not a size: write a positive number of B, KiB, MiB, GiB or TiB"
        )
    return int(match[1]) * _UNITS[match[2]]


def format_bytes(count: int) -> str:
    """Write bytes in the largest unit up to GiB that fits, rounded to one decimal: "1.5 MiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} B"
