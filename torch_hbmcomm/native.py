"""Loads the native module that fits the running PyTorch.

The layout of c10d's classes changes between PyTorch's minor releases, so a module built for another
release would corrupt memory. The package has a directory for each release that it was built for,
such as torch_2_13. The directory has the module _C.
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

    Raises ImportError. Its text has the cause and the remedy if the extension is built for another
    PyTorch, another Python or another version of this package, or was never built. If a system
    library is missing, the text names the library.
    """
    found = torch.__version__.partition("+")[0]
    major, minor = found.split(".")[:2]
    package = os.path.dirname(os.path.abspath(__file__))
    directory = os.path.join(package, f"torch_{major}_{minor}")
    if not any(os.path.exists(f"{directory}/_C{suffix}") for suffix in EXTENSION_SUFFIXES):
        # Imported here, because only this error needs it.
        from torch_hbmcomm.native_advice import what_is_missing

        raise ImportError(what_is_missing(package, found))
    _bound_arenas()
    _keep_to_own_processor()
    paths = sys.modules["torch_hbmcomm"].__path__
    if directory not in paths:
        paths.insert(0, directory)
    import torch_hbmcomm._C as native

    process_end.loaded.append(native)
    if process_end.ended:  # another thread began the exit during the import
        native.end_interpreter(here=False)
    _require_fit(native, package, found)
    native.set_mpi_search_path(_mpi_directories())
    if sys.executable:  # empty if a program embeds Python
        native.set_mpi_trial_program([sys.executable, "-I", "-S", f"{package}/mpi_trial.py"])
    return native


def _require_fit(native: ModuleType, package: str, found: str) -> None:
    """Raise ImportError for a module built for another PyTorch than its directory says, or from
    another version than the Python files."""
    built = native.build_info()
    same_torch = built["torch_version"].split(".")[:2] == found.split(".")[:2]
    if same_torch and built["version"] == __version__:
        return
    from torch_hbmcomm.native_advice import what_differs

    raise ImportError(what_differs(built, package, found))


def _bound_arenas() -> None:
    """Limit the number of memkind's arenas. The default is four per CPU for each heap. With
    hundreds of CPUs that exceeds memkind's own maximum, and memkind ends the process."""
    most = 64
    if os.environ.get("MEMKIND_ARENA_NUM_PER_KIND") == "":
        del os.environ["MEMKIND_ARENA_NUM_PER_KIND"]
    if 4 * (os.cpu_count() or 1) > most:
        os.environ.setdefault("MEMKIND_ARENA_NUM_PER_KIND", str(most))


def _keep_to_own_processor() -> None:
    """Disable hwloc's x86 component, which runs code on each processor in turn.

    memkind uses hwloc to find high-bandwidth memory. On a busy machine the component would make the
    thread wait for each processor. memkind needs only facts that the kernel's files have. If
    HWLOC_COMPONENTS is set, hwloc ignores the variables that show it another machine, so then this
    removes the value that a parent process with hbm has left.
    """
    without_x86 = "-x86"
    if not any(map(os.environ.get, ("HWLOC_XMLFILE", "HWLOC_SYNTHETIC", "HWLOC_FSROOT"))):
        os.environ.setdefault("HWLOC_COMPONENTS", without_x86)
    elif os.environ.get("HWLOC_COMPONENTS") == without_x86:
        del os.environ["HWLOC_COMPONENTS"]
    if not os.path.isdir("/sys/devices/system/cpu"):
        os.environ.setdefault("HWLOC_HIDE_ERRORS", "2")  # else hwloc prints that there is no /sys


def _mpi_directories() -> list[str]:
    """Return the library directories of PyPI's mpich: in Python's prefix, or below "local" there,
    as in Debian's Python."""
    roots = dict.fromkeys([sys.prefix, sys.base_prefix])
    return [os.path.join(root, *local, "lib") for root in roots for local in ((), ("local",))]
