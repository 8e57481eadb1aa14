"""Names that tests leave behind in /dev/shm, without names of the machine's other processes."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from functools import cache
from pathlib import Path

SHM = Path("/dev/shm")
_NAMES = ("hbmcomm-", "mpich_shm_")  # of this project's and MPICH's entries

_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_PRIVATE = 2, 4, 1 << 18


@cache
def isolate() -> bool:
    """Give this process, and all that it starts later, a /dev/shm of their own.

    Returns False if that is not permitted.
    """
    libc = ctypes.CDLL(None)
    at = os.fsencode(SHM)
    return bool(
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(None, at, None, _MS_PRIVATE, None) == 0  # keeps the next mount from others
        and libc.mount(b"tmpfs", at, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=1777") == 0
    )


def entries() -> set[str]:
    return set(os.listdir(SHM))


def left_since(before: set[str]) -> set[str]:
    """Return the new entries that no living process maps.

    If other jobs share /dev/shm, it returns only entries of this user with a name in _NAMES, and no
    socket that has a listener.
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
        pass  # a socket without a listener
    return True


def _maps_of_all() -> str:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append((process / "maps").read_text())
        except OSError:
            continue  # the process has just ended, or belongs to another user
    return "".join(found)
