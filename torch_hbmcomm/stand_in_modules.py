"""Finds modules of torch-ccl and torch_ucc that are not installed, for HBMCOMM_INSTEAD_OF.

Programs of these backends import `oneccl_bindings_for_pytorch`, `torch_ccl` or `torch_ucc`, and
libraries ask for the metadata of the distribution `oneccl_bind_pt`. The finder is the last of
sys.meta_path, so Python asks it only for modules that are not installed. A module that it finds is
a file of this package, under the name that the program imports.

If the variable has a wrong value, no such module is found, and the first search prints the reason.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType

from torch_hbmcomm.variables import say

_FOLDER = Path(__file__).parent
_OF_CCL = ("oneccl_bindings_for_pytorch", "torch_ccl")
# The files of the modules, by the backend whose programs import them.
_FILES = {
    "ccl": dict.fromkeys(_OF_CCL, _FOLDER / "ccl_bindings.py"),
    "ucc": {"torch_ucc": _FOLDER / "ucc_bindings.py"},
}
# The version of torch-ccl's last release: libraries compare the version with older ones.
CCL_VERSION = "2.8.0+hbm"
_METADATA = f"""Metadata-Version: 2.1
Name: oneccl_bind_pt
Version: {CCL_VERSION}
Summary: torch_hbmcomm in the place of oneCCL's bindings for PyTorch (HBMCOMM_INSTEAD_OF)
"""


def explain_absence(cause: str) -> None:
    """Have the first search for such a module that is not installed print `cause` as a warning."""
    sys.meta_path.append(_Explanation(cause))


def install(backends: Iterable[str]) -> None:
    """Have imports and importlib.metadata find the modules of these backends that this environment
    lacks."""
    files: dict[str, Path] = {}
    for backend in backends:
        files |= _FILES.get(backend, {})
    if files:
        sys.meta_path.append(_Finder(files))


class _Explanation(MetaPathFinder):
    def __init__(self, cause: str) -> None:
        self._cause = cause
        self._said = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if not self._said and any(name in files for files in _FILES.values()):
            self._said = True
            say(f"no module {name}: {self._cause}")


class _Finder(DistributionFinder):
    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files  # by module

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._files:
            return None
        return importlib.util.spec_from_file_location(name, self._files[name])

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[Distribution]:
        """Yield torch-ccl's metadata if they are asked for by name, and no module of torch-ccl is
        installed."""
        asked = re.sub(r"[-_.]+", "_", context.name or "").lower()
        if asked == "oneccl_bind_pt" and all(map(_is_ours, _OF_CCL)):
            yield _Metadata()


def _is_ours(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # the program has made a module of this name, which has no spec
        return False
    return spec is not None and spec.origin == str(_FILES["ccl"][module])


class _Metadata(Distribution):
    def read_text(self, filename: str) -> str | None:
        return _METADATA if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return _FOLDER / path
