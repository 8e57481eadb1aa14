"""The machine, as Linux tells it, and the version of torch_hbmcomm that is installed."""

import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

Machine = dict[str, str | int | None]


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            return value.strip()
    return platform.machine()  # AArch64 names no model


def cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0))


def installed_version() -> str | None:
    """None in a source tree that is not installed."""
    try:
        return metadata.version("torch_hbmcomm")
    except metadata.PackageNotFoundError:
        return None


def free_memory() -> int:
    """Bytes that programs can still have without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        field, _, value = line.partition(":")
        if field == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable: Linux 3.14 or later is needed")


def describe_machine() -> Machine:
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch_hbmcomm": installed_version(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
