"""What a running process has of torch_hbmcomm's memory, as /proc tells; the process takes no part.

A segment is a file in memory, named after its policy. Its owner holds it open, and so do the
children that its owner forks. Neighbours map it and close it. So what a process maps and does not
hold open is another one's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")

_NAME = re.compile(r"/memfd:hbmcomm-(?P<policy>\w+)")
_RANGE = re.compile(r"(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ \S+ \S+ (?P<inode>\d+)")
_SIZE = re.compile(r"(?P<key>Rss|ShmemPmdMapped): +(?P<kib>\d+) kB")
_PLACED = re.compile(
    r"(?P<begin>[0-9a-f]+) "
    r"(?P<placement>(?:prefer \(many\)|weighted interleave|[a-z]+)(?:=[a-z|]+)?(?::[\d,-]+)?)"
)
_ON_NODE = re.compile(r" N(?P<node>\d+)=(?P<pages>\d+)")
_PAGE = re.compile(r" kernelpagesize_kB=(?P<kib>\d+)")
_SETTING = re.compile(r"(HBMCOMM|MEMKIND)_\w+=")


class InspectionError(Exception):
    """Nothing can be said about a process; the text says why."""


@dataclass
class Segment:
    """One segment, as the process maps it."""

    policy: str
    name: str
    inode: int
    size_bytes: int = 0
    """Of address space."""
    resident_bytes: int = 0
    """What this process has touched and is in memory."""
    by_node: dict[int, int] = field(default_factory=dict)
    """NUMA node -> resident bytes; empty where the kernel does not tell."""
    huge_bytes: int = 0
    """Of the resident bytes: on huge pages."""
    placement: str = "default"
    """Where the kernel is to put pages, in its own words, as in ``bind:4``."""
    held_bytes: int | None = None
    """What the segment takes, whoever touched it; None for a neighbour's."""
    owner: int | None = None
    """The process that made it; None for a neighbour's that cannot be looked into."""


@dataclass
class Process:
    pid: int
    command: str
    segments: list[Segment]
    """Its own, and what it has inherited."""
    neighbours: list[Segment]
    placed: dict[str, dict[int, int]]
    """Private memory that was placed (staging in HBM): placement -> NUMA node -> bytes."""
    settings: dict[str, str]
    """Variables of this package and of memkind that it was started with."""


@dataclass
class _Range:
    """A line of numa_maps."""

    placement: str
    by_node: dict[int, int]
    private: bool


def inspect(pid: int, proc: Path = PROC) -> Process:
    """Raises InspectionError when there is no such process, or nothing of ours in it, or it is
    another user's."""
    home = proc / str(pid)
    try:
        mapped, opened = _mapped(home), _opened(home)
        command = (home / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()
        if not mapped:
            raise InspectionError(
                f"process {pid} ({command or 'ended, or a kernel thread'}) has no segment: it has "
                'formed no group of the backend "hbm" and placed no tensor'
            )
        for inode, segment in mapped.items():
            segment.held_bytes = opened.get(inode)
            holders = [pid, *_ancestors(pid, proc)] if inode in opened else _watched(home)
            segment.owner = _owner(inode, holders, proc)
        return Process(
            pid,
            command,
            [segment for inode, segment in mapped.items() if inode in opened],
            [segment for inode, segment in mapped.items() if inode not in opened],
            _placed(home),
            _settings(home),
        )
    except (FileNotFoundError, ProcessLookupError) as error:
        raise InspectionError(_gone(pid)) from error
    except PermissionError as error:
        if _is_zombie(home):  # which shows its files to root alone
            raise InspectionError(_gone(pid)) from error
        raise InspectionError(
            f"not permitted to look into process {pid}: run this as the user of that process, or "
            f"as root ({error})"
        ) from error


def _gone(pid: int) -> str:
    return f"there is no process {pid}, or it has just ended"


def _is_zombie(home: Path) -> bool:
    try:
        return "\nState:\tZ" in (home / "status").read_text()
    except OSError:
        return False


def _mapped(home: Path) -> dict[int, Segment]:
    """By inode."""
    found: dict[int, Segment] = {}
    places = _places(home)
    inside: Segment | None = None
    for line in (home / "smaps").read_text().splitlines():
        if match := _RANGE.match(line):
            name = _NAME.search(line)
            inside = None
            if name is None:
                continue
            inode = int(match["inode"])
            inside = found.setdefault(inode, Segment(name["policy"], name[0][1:], inode))
            begin = int(match["begin"], 16)
            inside.size_bytes += int(match["end"], 16) - begin
            if begin in places:
                inside.placement = places[begin].placement
                _add(inside.by_node, places[begin].by_node)
        elif inside is not None and (size := _SIZE.match(line)):
            if size["key"] == "Rss":
                inside.resident_bytes += int(size["kib"]) << 10
            else:
                inside.huge_bytes += int(size["kib"]) << 10
    return found


def _places(home: Path) -> dict[int, _Range]:
    """By first address; nothing where the kernel knows no NUMA nodes."""
    file = home / "numa_maps"
    if not file.exists():
        return {}
    found = {}
    for line in file.read_text().splitlines():
        match = _PLACED.match(line)
        if match is None:
            continue
        page = _PAGE.search(line)
        kib = int(page["kib"]) if page else 0
        nodes = {int(on["node"]): int(on["pages"]) * kib << 10 for on in _ON_NODE.finditer(line)}
        found[int(match["begin"], 16)] = _Range(
            match["placement"], nodes, private=" file=" not in line
        )
    return found


def _placed(home: Path) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for place in _places(home).values():
        if place.private and place.by_node and place.placement not in ("default", "local"):
            _add(found.setdefault(place.placement, {}), place.by_node)
    return found


def _add(total: dict[int, int], more: dict[int, int]) -> None:
    for node, size in more.items():
        total[node] = total.get(node, 0) + size


def _opened(home: Path) -> dict[int, int]:
    """Segments that the process holds open: inode -> bytes that the kernel holds."""
    found = {}
    for link, target in _descriptors(home):
        if _NAME.match(target):
            status = link.stat()
            found[status.st_ino] = status.st_blocks * 512
    return found


def _descriptors(home: Path) -> Iterator[tuple[Path, str]]:
    for link in (home / "fd").iterdir():
        try:
            yield link, os.readlink(link)
        except FileNotFoundError:  # closed since
            continue


def _watched(home: Path) -> list[int]:
    """Processes whose end this one waits for: its neighbours are among them."""
    found = []
    for link, target in _descriptors(home):
        if "pidfd" in target:
            details = (home / "fdinfo" / link.name).read_text()
            if match := re.search(r"^Pid:\s*(\d+)", details, re.MULTILINE):
                found.append(int(match[1]))
    return found


def _ancestors(pid: int, proc: Path) -> Iterator[int]:
    while pid > 1:
        match = re.search(r"^PPid:\s*(\d+)", (proc / str(pid) / "status").read_text(), re.MULTILINE)
        if match is None or match[1] == "0":
            return
        pid = int(match[1])
        yield pid


def _owner(inode: int, candidates: Iterable[int], proc: Path) -> int | None:
    """The last of the candidates that hold the file open: an owner comes after its children."""
    owner = None
    for pid in candidates:
        try:
            if inode in _opened(proc / str(pid)):
                owner = pid
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it has ended, or is not ours to look into
    return owner


def _settings(home: Path) -> dict[str, str]:
    variables = (home / "environ").read_bytes().decode(errors="replace").split("\0")
    return dict(sorted(text.split("=", 1) for text in variables if _SETTING.match(text)))
