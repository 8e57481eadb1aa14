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
from types import ModuleType

import torch

from torch_hbmcomm import process_end
from torch_hbmcomm.version import __version__


@cache
def load() -> ModuleType:
    """Return the module torch_hbmcomm._C.

    Raises ImportError naming the cause and what to install: another PyTorch, a system library that
    is missing, or an extension that was never built.
    """
    found = torch.__version__.partition("+")[0]
    major, minor = found.split(".")[:2]
    package = os.path.dirname(os.path.abspath(__file__))
    folder = os.path.join(package, f"torch_{major}_{minor}")
    if not any(os.path.exists(f"{folder}/_C{suffix}") for suffix in EXTENSION_SUFFIXES):
        # Imported here, as a rank that starts has no use for it.
        from torch_hbmcomm.native_advice import what_is_missing

        raise ImportError(what_is_missing(package, found))
    _bound_arenas()
    _keep_to_own_processor()
    places = sys.modules["torch_hbmcomm"].__path__
    if folder not in places:
        places.insert(0, folder)
    import torch_hbmcomm._C as native

    process_end.loaded.append(native)
    if process_end.ended:  # meanwhile, on another thread
        native.end_interpreter(here=False)
    _require_fit(native, package, found)
    native.set_mpi_search_path(_mpi_directories())
    if sys.executable:  # none where a program embeds Python
        native.set_mpi_trial_program([sys.executable, "-I", "-S", f"{package}/mpi_trial.py"])
    return native


def _require_fit(native: ModuleType, package: str, found: str) -> None:
    """Raise ImportError for a module that was built for another PyTorch than its folder says, or
    from other sources than the Python files beside it."""
    built = native.build_info()
    same_torch = built["torch_version"].split(".")[:2] == found.split(".")[:2]
    if same_torch and built["version"] == __version__:
        return
    from torch_hbmcomm.native_advice import what_differs

    raise ImportError(what_differs(built, package, found))


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
    if not os.path.isdir("/sys/devices/system/cpu"):
        os.environ.setdefault("HWLOC_HIDE_ERRORS", "2")  # hwloc prints that there is no /sys


def _mpi_directories() -> list[str]:
    """Return where PyPI's mpich puts its libraries: beside the Python that installed it, or in the
    folder "local" there, as Debian's Python has it."""
    roots = dict.fromkeys([sys.prefix, sys.base_prefix])
    return [os.path.join(root, *local, "lib") for root in roots for local in ((), ("local",))]
