"""The releases of PyTorch that the extension torch_hbmcomm._C is built for.

A binary serves one minor release. A build takes the PyTorch of its environment, or those that
HBMCOMM_TORCH names: folders of unpacked wheels, with a colon between them. Only their headers,
their version.py and three libraries are read (LIBRARIES); PyTorch is not imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

# Minor releases of PyTorch 2 that the sources compile against.
OLDEST, NEWEST = 11, 15
DEVELOPMENT = 13  # what .venv has, and the tests and benchmarks run on
LIBRARIES = ["libc10.so", "libtorch_cpu.so", "libtorch_python.so"]


class TorchRelease(NamedTuple):
    version: str  # as in 2.13.0
    folder: Path  # of the package torch

    @property
    def minor(self) -> int:
        """The second number: the first is always 2."""
        return int(self.version.split(".")[1])

    @property
    def package(self) -> str:
        """The folder of torch_hbmcomm that has the extension for this release."""
        return f"torch_2_{self.minor}"


def find() -> list[TorchRelease]:
    """Return the releases to build for, the oldest first.

    Raises LookupError, which says what to do, where there is none, one that the sources do not
    compile against, or two of one minor release.
    """
    named = os.environ.get("HBMCOMM_TORCH", "")
    if not named:
        return [installed()]
    folders = [_package(Path(name)) for name in named.split(":")]
    found = sorted((_release(folder) for folder in folders), key=lambda release: release.minor)
    if len({release.minor for release in found}) < len(found):
        raise LookupError(
            f"HBMCOMM_TORCH={named} names two PyTorches of one minor release: "
            f"{', '.join(release.version for release in found)}; leave one of each"
        )
    return found


def installed() -> TorchRelease:
    """Return the PyTorch of this environment; LookupError as above."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(
            "torch_hbmcomm is compiled against PyTorch, which this environment lacks: install "
            f"PyTorch 2.{OLDEST} to 2.{NEWEST} first, then torch_hbmcomm by "
            "`pip install --no-build-isolation`, which lets the build see it. A wheel of "
            "torch_hbmcomm needs no compiler; HBMCOMM_WITHOUT_TORCH=1 builds the memory box alone"
        )
    return _release(Path(spec.submodule_search_locations[0]))


def requirement(minors: list[int]) -> str:
    """Return what pip may install beside extensions for these minor releases of PyTorch 2."""
    gaps = sorted(set(range(min(minors), max(minors))) - set(minors))
    return ",".join(
        [
            f"torch>=2.{min(minors)}",
            f"<2.{max(minors) + 1}",
            *(f"!=2.{gap}.*" for gap in gaps),
        ]
    )


def _package(folder: Path) -> Path:
    package = (folder / "torch").resolve()
    for needed in ["version.py", "include", *(f"lib/{name}" for name in LIBRARIES)]:
        if not (package / needed).exists():
            raise LookupError(
                f"HBMCOMM_TORCH names {folder}, which has no torch/{needed}: name folders into "
                "which wheels of PyTorch were unpacked"
            )
    return package


def _release(folder: Path) -> TorchRelease:
    text = (folder / "version.py").read_text()
    version = re.search(r"^__version__ = '(\d+\.\d+\.\d+)", text, re.MULTILINE)
    release = TorchRelease(version[1] if version else "0.0.0", folder)
    if not release.version.startswith("2.") or not OLDEST <= release.minor <= NEWEST:
        raise LookupError(
            f"torch_hbmcomm compiles against PyTorch 2.{OLDEST} to 2.{NEWEST}, and {folder} is "
            f"{release.version}: install one of those, or a newer torch_hbmcomm"
        )
    return release
