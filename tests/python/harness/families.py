"""Processes with all that they started, even in other sessions, as torchrun's workers are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any


def processes() -> dict[int, list[str]]:
    """Return the machine's processes with the fields of /proc/PID/stat, from the third on.

    The fields are the state, the parent, the group, the session and so on (proc(5)).
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended since
            # The name, in parentheses, may have spaces.
            found[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    return found


def family(root: int) -> dict[int, list[str]]:
    """Return process `root` and its living descendants with their fields, as processes() does.

    A process whose parent has ended is in no family.
    """
    found, members = processes(), {root}
    while more := {pid for pid, fields in found.items() if int(fields[1]) in members} - members:
        members |= more
    return {pid: found[pid] for pid in members & found.keys()}


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill the process, its group, and its descendants in all groups.

    REQUIRES: the process leads a group
    """
    members = family(process.pid) if process.poll() is None else {}
    with contextlib.suppress(ProcessLookupError):  # all processes have ended
        os.killpg(process.pid, signal.SIGKILL)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
