"""Facts about this machine: the processors and the memory that this process may use, and the
installed versions of this package."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            return value.strip()
    return platform.machine()  # on AArch64 the file has no "model name"


def cores() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def distributions() -> dict[str, str]:
    """Return the version of each installed distribution that has this package: torch_hbmcomm, or
    hbmcomm-box for the memory box alone. The result is empty in a source tree that is not
    installed."""
    found = {}
    for name in ("torch_hbmcomm", "hbmcomm-box"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def memory() -> int:
    """Return the machine's memory in bytes, or the lowest limit of this process' control groups if
    this limit is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(Path("/proc/self/cgroup").read_text())])


def _limits(groups: str) -> list[int]:
    """Return the limits of control groups and of the groups that contain them, in bytes.

    groups: one control group on each line, as in "0::/a/b" (version 2) or "5:memory:/a/b"
    (version 1)
    """
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = _CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = _CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for directory in [group, *group.parents][: len(group.parts) - len(top.parts) + 1]:
            # A container may not see all directories of the path. "max" means: no limit.
            text = (directory / name).read_text().strip() if (directory / name).exists() else "max"
            if text != "max":
                found.append(int(text))
    return found
