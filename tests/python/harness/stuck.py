"""Shows what a test that takes too long waits for.

Shortly before the time limit of pytest-timeout, a thread notes the processes of the test, with the
stacks of Python's. It also notes the processes of the machine that take the processors. The report
of a failed test has the notes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.families import family, processes

_SHARE = 0.85  # of the time limit
_BUSIEST = 12  # processes of the machine
_STACKS = 8  # the most processes whose stacks are shown
_STACK_SECONDS = 5  # for the stacks of a process
_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def notes_of(item: pytest.Item) -> Iterator[None]:
    """Add notes to the report of `item` if the block takes nearly as long as the test may."""
    marker = item.get_closest_marker("timeout")
    limit = float((marker.args[0] if marker else item.config.getini("timeout")) or 0)
    if limit == 0:  # no limit
        yield
        return
    timer = threading.Timer(_SHARE * limit, _note, [item])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _note(item: pytest.Item) -> None:
    item.add_report_section("call", "processes", note(os.getpid()))


def note(root: int) -> str:
    """Return a text about process `root` and its descendants, and about the busiest processes.

    Takes a second, and at most _STACKS * _STACK_SECONDS more.
    """
    before = processes()
    time.sleep(1)
    after = processes()
    used = {
        pid: (_ticks(fields) - _ticks(before[pid])) / _TICKS
        for pid, fields in after.items()
        if pid in before
    }
    busiest = sorted(used, key=lambda pid: used[pid], reverse=True)[:_BUSIEST]
    load = Path("/proc/loadavg").read_text().strip()
    members = dict(sorted(family(root).items()))
    return "\n".join(
        [
            "PID PARENT STATE CPU-SECONDS-OF-LAST ALL-CPU-SECONDS WAITS-IN COMMAND",
            *_lines(members, used),
            f"the busiest of the machine, load {load}:",
            *_lines({pid: after[pid] for pid in busiest}, used),
            *_stacks(members),
        ]
    )


def _stacks(pids: Iterable[int]) -> Iterator[str]:
    """Yield the stacks of the first processes that run Python, C++ included, by py-spy."""
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--native", "--pid"]
    shown = 0
    for pid in pids:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if pid == os.getpid() or b"python" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                continue
            shown += 1
            yield subprocess.check_output(
                [*command, str(pid)], stderr=subprocess.DEVNULL, timeout=_STACK_SECONDS, text=True
            )
        if shown == _STACKS:
            return


def _ticks(fields: list[str]) -> int:
    return int(fields[11]) + int(fields[12])


def _lines(found: dict[int, list[str]], used: dict[int, float]) -> Iterable[str]:
    for pid, fields in found.items():
        waits, command = "?", b"?"
        with contextlib.suppress(OSError):  # ended since
            waits = Path(f"/proc/{pid}/wchan").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200]
        words = [pid, fields[1], fields[0], f"{used.get(pid, 0):.2f}", _ticks(fields) / _TICKS]
        yield " ".join(map(str, [*words, waits, command.decode(errors="replace").strip()]))
