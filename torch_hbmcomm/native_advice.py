"""Error texts of native.py: the reason why no native module fits, and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from torch_hbmcomm.version import __version__


def releases(package: Path) -> list[str]:
    """Return the minor releases of PyTorch, as in "2.13", that an installed torch_hbmcomm serves:
    it has modules for them that this Python can load. The oldest is first.

    package: the directory of this torch_hbmcomm
    """
    directories = [directory for directory in package.glob("torch_*") if _has_module(directory)]
    versions = sorted(
        [int(part) for part in directory.name.split("_")[1:]] for directory in directories
    )
    return [".".join(map(str, version)) for version in versions]


def _has_module(directory: Path) -> bool:
    return any((directory / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def what_is_missing(directory: str, found: str) -> str:
    """Describe the module that the package in `directory` lacks, and the remedy. found: the version
    of PyTorch"""
    package = Path(directory)
    minor = ".".join(found.split(".")[:2])
    served = releases(package)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lacking = f"torch_hbmcomm has no native module for PyTorch {found} and Python {python}"
    if _is_checkout(package):
        return (
            f"{lacking} in {package}{f', only for {_listed(served)}' if served else ''}: build it "
            f"with `make build`, or with `pip install --no-build-isolation --editable "
            f"{package.parent}` in the environment of that PyTorch"
        )
    if served:
        return (
            f"{lacking}: what is installed in {package} serves PyTorch {_listed(served)}. Install "
            f"one of these, as in `pip install 'torch=={served[-1]}.*'`, or a torch_hbmcomm that "
            f"serves {minor}: `pip install --upgrade torch_hbmcomm`"
        )
    if any(package.glob("torch_*/_C*")):
        return (
            f"{lacking}: what is installed in {package} is for another Python; install "
            f"torch_hbmcomm with this one: `{sys.executable} -m pip install torch_hbmcomm`"
        )
    return (
        f"{lacking}: {package} is the memory box alone (hbmcomm-box). For the process group: "
        "`pip uninstall hbmcomm-box`, then `pip install torch_hbmcomm`"
    )


def what_differs(built: Mapping[str, str], directory: str, found: str) -> str:
    """Describe why the module in `directory` does not fit PyTorch or the Python files there, and
    the remedy. built: the module's build_info(). found: the version of PyTorch"""
    again = "uninstall and install torch_hbmcomm again"
    if _is_checkout(Path(directory)):
        again = "rebuild it"
    if built["torch_version"].split(".")[:2] != found.split(".")[:2]:
        return (
            f"torch_hbmcomm's native module was built for PyTorch {built['torch_version']}, and "
            f"this is {found}: {again}"
        )
    return (
        f"torch_hbmcomm's native module is of version {built['version']}, and the Python files "
        f"in {directory} are of {__version__}, as after another version of "
        f"hbmcomm-box was installed over torch_hbmcomm: {again}, without hbmcomm-box"
    )


def _is_checkout(package: Path) -> bool:
    return (package.parent / "setup.py").exists()


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
