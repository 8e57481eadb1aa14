"""Registers the backend "hbm" when torch is imported (entry point torch.backends).

Importing this package also calls register(), because the entry point may be switched off, or
PyTorch may have found an accelerator after the entry point ran. register() loads the native module
only if HBMCOMM_ALLOCATOR asks for it, and replaces the backends that HBMCOMM_INSTEAD_OF names. A
wrong value of either variable raises at the first use of hbm and not here, because programs without
hbm import torch too.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch_hbmcomm import process_end
from torch_hbmcomm.early_failure import backend_creator
from torch_hbmcomm.variables import value


def register() -> None:
    """Register the backend "hbm" and the init method "mpi://", once. Each call also sets hbm's
    devices: the CPU, and the accelerator if PyTorch has found one by now."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return  # this PyTorch was built without torch.distributed
    backend = distributed.Backend
    known = "hbm" in backend.backend_list
    if not known:
        backend.register_backend("hbm", _create, extended_api=True, devices=["cpu"])
    # The devices are set here, because register_backend() would make hbm the default backend of an
    # accelerator that has no default backend.
    backend.backend_capability["hbm"] = _devices()
    if known:
        return
    process_end.register()
    # torch.distributed.rendezvous is hidden behind a function of the same name.
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    rendezvous.register_rendezvous_handler("mpi", _rendezvous)
    if value("HBMCOMM_ALLOCATOR") == "segment":
        from torch_hbmcomm.memory import place_large_tensors_at_import

        place_large_tensors_at_import()
    if instead_of := value("HBMCOMM_INSTEAD_OF"):
        from torch_hbmcomm.instead_of import take_the_place_of

        take_the_place_of(instead_of)


def _devices() -> list[str]:
    torch: Any = sys.modules["torch"]
    accelerator = torch._C._get_accelerator().type  # "cpu" where there is none
    return ["cpu"] if accelerator == "cpu" else ["cpu", accelerator]


def register_with_torch() -> None:
    """Register now if torch has been imported, else when it is imported. Does not import torch."""
    if "torch" in sys.modules:
        register()
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Calls register() when torch has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """Gives torch its own loader back, loads torch with that loader, and calls register()."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register()


def _create(distributed_options: Any, group_options: Any) -> Any:
    return backend_creator(distributed_options)(distributed_options, group_options)


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    from torch_hbmcomm.rendezvous import rendezvous

    return rendezvous(url, **options)
