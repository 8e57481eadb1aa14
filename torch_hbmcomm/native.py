"""Loads the native module after checking that it fits the running PyTorch.

The layout of c10d's classes changes between PyTorch's minor releases, so a module built for another
one would not fail cleanly but corrupt memory.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

_SUPPORTED = "2.13"


@cache
def load() -> ModuleType:
    """Return the module torch_hbmcomm._C.

    Raises ImportError naming the cause: another PyTorch, a system library that is missing, or an
    extension that was never built.
    """
    found = torch.__version__.partition("+")[0]
    if found.split(".")[:2] != _SUPPORTED.split("."):
        raise ImportError(
            f"torch_hbmcomm was built for PyTorch {_SUPPORTED}, and this is {found}; install "
            f"torch=={_SUPPORTED}.* or a torch_hbmcomm for {found}"
        )
    here = Path(__file__).parent
    if not any((here / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        raise ImportError(
            f"torch_hbmcomm has no native module for Python {sys.version_info.major}."
            f"{sys.version_info.minor} in {here}; build it with `make build`"
        )
    _bound_arenas()
    import torch_hbmcomm._C as native

    built_for = native.build_info()["torch_version"]
    if built_for.split(".")[:2] != found.split(".")[:2]:
        raise ImportError(
            f"torch_hbmcomm's native module was built for PyTorch {built_for}, and this is "
            f"{found}; rebuild it with `make build`"
        )
    native.set_mpi_search_path(_mpi_directories())
    return native


def _bound_arenas() -> None:
    """Limit memkind's arenas: on machines with hundreds of CPUs its default, four a CPU for each
    heap, exceeds its own maximum, and memkind ends the process."""
    most = 64
    if 4 * (os.cpu_count() or 1) > most:
        os.environ.setdefault("MEMKIND_ARENA_NUM_PER_KIND", str(most))


def _mpi_directories() -> list[str]:
    """Return where PyPI's mpich puts libmpi.so.12: beside the Python that installed it."""
    roots = [sysconfig.get_path("data"), sys.prefix, sys.base_prefix]
    return [os.path.join(root, "lib") for root in dict.fromkeys(roots)]
