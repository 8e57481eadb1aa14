"""Byte counts: read from text, written for people, and laddered."""

import re

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_bytes(text: str) -> int:
    """`"4096"`, `"64KiB"`, `"64 MiB"`. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: write a positive number of B, KiB, MiB or GiB")
    return int(match[1]) * _UNITS[match[2]]


def format_bytes(count: int) -> str:
    """The shortest form that is exact or has one decimal."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} B"


def ladder(smallest: int, largest: int, factor: int = 8) -> list[int]:
    """From `smallest` up in steps of `factor`, ending with `largest`."""
    if smallest > largest:
        raise ValueError(
            f"the smallest size ({format_bytes(smallest)}) is larger than the largest "
            f"({format_bytes(largest)})"
        )
    steps = [largest]
    size = smallest
    while size < largest:
        steps.append(size)
        size *= factor
    return sorted(steps)
