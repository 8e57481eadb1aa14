"""Records the operations of this process for `hbmcomm profile` and Prometheus (docs/profile.md)."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch_hbmcomm.profiling.ranks import VERSION
from torch_hbmcomm.variables import value


@contextmanager
def profile(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Record this process' operations on groups of hbm, and write them to `folder` at the end.

    Each rank calls it, and writes the file ``rank-N.json``. The folder is made if it is missing; it
    may be shared by all machines, or copied together later. The command ``hbmcomm profile FOLDER``
    then shows what to change first. The latest 65,536 operations are kept. Operations that are in
    flight at the end are recorded without an end. A process that has formed no group writes no
    file.

    Raises:
        RuntimeError: this process records already (HBMCOMM_PROFILE).
        OSError: the folder or the file cannot be written.
    """
    if not _native().profile_start():
        by_variable = _Recording.by_variable == os.getpid()
        raise RuntimeError(
            "hbmcomm.profile(): this process records a profile already; "
            + ("unset HBMCOMM_PROFILE" if by_variable else "end that one first")
        )
    path, process = Path(folder).absolute(), os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:  # else this is a forked child
            _write(path)


def start_if_asked() -> None:
    """Record until the process ends, if HBMCOMM_PROFILE names a folder, and write metrics if
    HBMCOMM_METRICS does.

    A process that os._exit() or a signal ends writes no file, except a child of multiprocessing. A
    failure to write is a warning.
    """
    if os.getpid() == _Recording.asked:
        return
    _Recording.asked = os.getpid()
    if folder := value("HBMCOMM_PROFILE"):
        _record_into(Path(folder).absolute())
    if folder := value("HBMCOMM_METRICS"):
        from torch_hbmcomm.profiling import metrics  # here: most processes do not need it

        metrics.start(Path(folder).absolute())


class _Recording:
    asked = 0  # the process that has read the variables
    by_variable = 0  # the process that records because of HBMCOMM_PROFILE


def _native() -> Any:
    from torch_hbmcomm.native import load

    return load()


def _record_into(folder: Path) -> None:
    from torch_hbmcomm.profiling.process_end import at_process_end

    if not _native().profile_start():
        _native().warn(f"HBMCOMM_PROFILE={folder} is ignored: hbmcomm.profile() records already")
        return
    _Recording.by_variable = os.getpid()

    def write() -> None:
        try:
            _write(folder, from_first_operation=True)
        except OSError as error:
            _native().warn(f"HBMCOMM_PROFILE={folder}: the profile cannot be written: {error}")

    at_process_end(write)


def _write(folder: Path, from_first_operation: bool = False) -> None:
    """Write the file of this rank. Its time begins with the record, or with the first operation:
    before that, a program imports modules and reads data."""
    records = _native().profile_stop()
    rank = records["rank"]
    if rank < 0:
        return  # this process has formed no group, so nothing is recorded
    if from_first_operation and records["operations"]:
        records["begin"] = records["operations"][0]["begin"]
    text = json.dumps(
        {
            "version": VERSION,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "clock": _clock(),
            "written": time.time(),
            **records,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".rank-{rank}.{os.getpid()}"
    try:
        part.write_text(text)
        part.replace(folder / f"rank-{rank}.json")
    finally:
        with suppress(OSError):
            part.unlink()


def _clock() -> str:
    """Return the name of the clock of this process' times, which other processes may share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    namespace = Path("/proc/self/ns/time")  # absent before Linux 5.6
    return f"{boot}/{namespace.readlink() if namespace.is_symlink() else ''}"
