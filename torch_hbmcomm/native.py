"""Loads the native module that fits the running PyTorch.

The layout of c10d's classes changes between PyTorch's minor releases, so a module built for another
one would not fail cleanly but corrupt memory. The package has a folder for each release that it was
built for, as in torch_2_13, with the module _C for it.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

from torch_hbmcomm.version import __version__


@cache
def load() -> ModuleType:
    """Return the module torch_hbmcomm._C.

    Raises ImportError naming the cause and what to install: another PyTorch, a system library that
    is missing, or an extension that was never built.
    """
    found = torch.__version__.partition("+")[0]
    major, minor = found.split(".")[:2]
    package = Path(__file__).parent
    folder = package / f"torch_{major}_{minor}"
    if not _has_module(folder):
        raise ImportError(_advice(package, found))
    _bound_arenas()
    _keep_to_own_processor()
    places = sys.modules["torch_hbmcomm"].__path__
    if str(folder) not in places:
        places.insert(0, str(folder))
    import torch_hbmcomm._C as native

    _require_fit(native, package, found)
    native.set_mpi_search_path(_mpi_directories())
    return native


def releases(package: Path) -> list[str]:
    """Return the minor releases of PyTorch, as in "2.13", for which `package`, the folder of an
    installed torch_hbmcomm, has modules that this Python can load; the oldest first."""
    folders = [folder for folder in package.glob("torch_*") if _has_module(folder)]
    versions = sorted([int(part) for part in folder.name.split("_")[1:]] for folder in folders)
    return [".".join(map(str, version)) for version in versions]


def _has_module(folder: Path) -> bool:
    return any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def _advice(package: Path, found: str) -> str:
    """Return what is missing in `package`, a folder, for the PyTorch found, and what to install."""
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


def _require_fit(native: ModuleType, package: Path, found: str) -> None:
    """Raise ImportError for a module that was built for another PyTorch than its folder says, or
    from other sources than the Python files beside it."""
    built = native.build_info()
    again = "rebuild it" if _is_checkout(package) else "uninstall and install torch_hbmcomm again"
    if built["torch_version"].split(".")[:2] != found.split(".")[:2]:
        raise ImportError(
            f"torch_hbmcomm's native module was built for PyTorch {built['torch_version']}, and "
            f"this is {found}: {again}"
        )
    if built["version"] != __version__:
        raise ImportError(
            f"torch_hbmcomm's native module is of version {built['version']}, and the Python files "
            f"in {package} are of {__version__}, as after another version of "
            f"hbmcomm-box was installed over torch_hbmcomm: {again}, without hbmcomm-box"
        )


def _is_checkout(package: Path) -> bool:
    return (package.parent / "setup.py").exists()


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _bound_arenas() -> None:
    """Limit memkind's arenas: on machines with hundreds of CPUs its default, four a CPU for each
    heap, exceeds its own maximum, and memkind ends the process."""
    most = 64
    if 4 * (os.cpu_count() or 1) > most:
        os.environ.setdefault("MEMKIND_ARENA_NUM_PER_KIND", str(most))


def _keep_to_own_processor() -> None:
    """Have hwloc, by which memkind looks for high-bandwidth memory, leave out what it would run on
    each processor in turn to find out: on a busy machine the thread waits for a turn on each, and
    the kernel's files tell all that memkind asks for."""
    os.environ.setdefault("HWLOC_COMPONENTS", "-x86")


def _mpi_directories() -> list[str]:
    """Return where PyPI's mpich puts its libraries: beside the Python that installed it, or in the
    folder "local" there, as Debian's Python has it."""
    roots = dict.fromkeys([sys.prefix, sys.base_prefix])
    return [os.path.join(root, *local, "lib") for root in roots for local in ((), ("local",))]
