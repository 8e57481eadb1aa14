"""Names that tests leave behind in /dev/shm, apart from those of the machine's other processes."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from functools import cache
from pathlib import Path

SHM = Path("/dev/shm")
_NAMES = ("hbmcomm-", "mpich_shm_")  # what this project and MPICH make there

_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_PRIVATE = 2, 4, 1 << 18


@cache
def isolate() -> bool:
    """Gives this process, and all that it starts from now on, a /dev/shm of its own, if it may."""
    libc = ctypes.CDLL(None)
    at = os.fsencode(SHM)
    return bool(
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(None, at, None, _MS_PRIVATE, None) == 0  # or everyone would see the next
        and libc.mount(b"tmpfs", at, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=1777") == 0
    )


def entries() -> set[str]:
    return set(os.listdir(SHM))


def left_since(before: set[str]) -> set[str]:
    """The new entries that no living process maps.

    Where /dev/shm is shared with other jobs, only those whose names and owner may be ours, and
    where nobody listens.
    """
    new = entries() - before
    if not isolate():
        new = {name for name in new if _may_be_left_by_us(SHM / name)}
    maps = _maps_of_all() if new else ""
    return {name for name in new if f"{SHM}/{name}" not in maps}


def _may_be_left_by_us(path: Path) -> bool:
    if not path.name.startswith(_NAMES):
        return False
    try:
        found = path.stat()
        if found.st_uid != os.geteuid():
            return False
        if stat.S_ISSOCK(found.st_mode):
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(path))
            return False
    except FileNotFoundError:
        return False
    except OSError:
        pass  # nobody listens
    return True


def _maps_of_all() -> str:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append((process / "maps").read_text())
        except OSError:
            continue  # it has just ended, or is not ours to look into
    return "".join(found)
