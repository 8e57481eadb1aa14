"""What a running process has of torch_hbmcomm's memory, read from /proc. The process takes no part.

A segment is a file in memory, named after its policy. Its owner holds it open; a neighbour maps it
and closes it, so what a process maps and does not hold open belongs to another one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_NAME = re.compile(r"/memfd:hbmcomm-(?P<policy>\w+)")
_RANGE = re.compile(r"(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ \S+ \S+ (?P<inode>\d+) *(?P<path>.*)")
_SIZE = re.compile(r"(?P<key>Rss|ShmemPmdMapped): +(?P<kib>\d+) kB")
_ON_NODE = re.compile(r"\bN(?P<node>\d+)=(?P<pages>\d+)")
_PAGE = re.compile(r"\bkernelpagesize_kB=(?P<kib>\d+)")

Settings = dict[str, str]


class InspectionError(Exception):
    """Why nothing can be said about a process."""


@dataclass
class Mapping:
    """A segment as one process maps it; bytes."""

    policy: str
    inode: int
    name: str
    size_bytes: int
    """Of the address space."""
    resident_bytes: int = 0
    """What this process has touched."""
    huge_bytes: int = 0
    """Of them, on huge pages."""
    by_node: dict[int, int] = field(default_factory=dict)
    """NUMA node -> resident bytes there."""


@dataclass
class Own(Mapping):
    """A segment of the process itself, or of the parent that it was forked from."""

    held_bytes: int = 0
    """What the kernel holds for it, whoever touched it."""
    inherited_from: int | None = None


@dataclass
class Neighbours(Mapping):
    """The segment of another process of this node."""

    pid: int | None = None
    """None when that process has ended, or cannot be looked into."""


@dataclass
class Process:
    pid: int
    command: str
    segments: list[Own]
    neighbours: list[Neighbours]
    placed: dict[str, dict[int, int]]
    """Private memory under a placement of its own (staging, where it comes from HBM), as the kernel
    names the placement: NUMA node -> bytes."""
    settings: Settings
    """HBMCOMM_* and MEMKIND_* variables that the process was started with."""
