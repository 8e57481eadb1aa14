"""Registers the backend "hbm" when torch is imported (entry point torch.backends). Loads nothing
native unless HBMCOMM_ALLOCATOR asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any


def register() -> None:
    """Register the backend "hbm" and the init method "mpi://", once."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return  # this PyTorch was built without torch.distributed
    if "hbm" in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend("hbm", _create, extended_api=True, devices=["cpu"])
    # torch.distributed.rendezvous is hidden behind a function of the same name.
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    rendezvous.register_rendezvous_handler("mpi", _rendezvous)
    _place_tensors(os.environ.get("HBMCOMM_ALLOCATOR", "default"))


def _place_tensors(where: str) -> None:
    if where not in ("default", "segment"):
        raise ValueError(f'HBMCOMM_ALLOCATOR={where} is neither "default" nor "segment"')
    if where == "segment":
        from torch_hbmcomm.memory import place_large_tensors_in_segment

        place_large_tensors_in_segment()


def _create(distributed_options: Any, group_options: Any) -> Any:
    from torch_hbmcomm.backend import create

    return create(distributed_options, group_options)


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    from torch_hbmcomm.rendezvous import rendezvous

    return rendezvous(url, **options)
