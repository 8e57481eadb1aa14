"""The processor, as Linux tells it, and the version of torch_hbmcomm that is installed."""

import os
import platform
from importlib import metadata
from pathlib import Path


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
