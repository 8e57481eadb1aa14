"""The releases of PyTorch that the extension torch_hbmcomm._C is built for.

A binary serves one minor release. A build is for the PyTorch of its environment, or for the
releases that HBMCOMM_TORCH names: directories of unpacked wheels, separated by colons. The build
reads only their headers, version.py and three libraries (LIBRARIES). It does not import PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

# Minor releases of PyTorch 2 that the sources compile against.
OLDEST, NEWEST = 11, 15
DEVELOPMENT = 13  # the release in .venv, which tests and benchmarks use
LIBRARIES = ["libc10.so", "libtorch_cpu.so", "libtorch_python.so"]


class TorchRelease(NamedTuple):
    version: str  # as in 2.13.0
    folder: Path  # of the package torch

    @property
    def minor(self) -> int:
        """The second number of the version; the first is always 2."""
        return int(self.version.split(".")[1])

    @property
    def package(self) -> str:
        """The directory in torch_hbmcomm that has the extension for this release."""
        return f"torch_2_{self.minor}"


def find() -> list[TorchRelease]:
    """Return the releases to build for, the oldest first.

    Raises LookupError if there is no release, if the sources do not compile against one of them, or
    if two have the same minor release. The error's text names the remedy.
    """
    named = os.environ.get("HBMCOMM_TORCH", "")
    if not named:
        return [installed()]
    folders = [_package(Path(name)) for name in named.split(":")]
    found = sorted((_release(folder) for folder in folders), key=lambda release: release.minor)
    if len({release.minor for release in found}) < len(found):
        raise LookupError(
            f"HBMCOMM_TORCH={named} names two PyTorches of one minor release: "
            f"{', '.join(release.version for release in found)}; name one per minor release"
        )
    return found


def installed() -> TorchRelease:
    """Return the PyTorch of this environment. Raises LookupError as find() does."""
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
    """Return pip's requirement that allows only these minor releases of PyTorch 2."""
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
                f"HBMCOMM_TORCH names {folder}, which has no torch/{needed}: name directories of "
                "unpacked PyTorch wheels"
            )
    return package


def _release(folder: Path) -> TorchRelease:
    text = (folder / "version.py").read_text()
    version = re.search(r"^__version__ = '(\d+\.\d+\.\d+)", text, re.MULTILINE)
    release = TorchRelease(version[1] if version else "0.0.0", folder)
    if not release.version.startswith("2.") or not OLDEST <= release.minor <= NEWEST:
        raise LookupError(
            f"torch_hbmcomm compiles against PyTorch 2.{OLDEST} to 2.{NEWEST}, and {folder} is "
            f"{release.version}: install one of these releases, or a newer torch_hbmcomm"
        )
    return release
