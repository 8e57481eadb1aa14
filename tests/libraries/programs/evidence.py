"""The options of a program, and its report to the test: numbers, and the backend that it used."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Options:
    folder: Path  # directory of the evidence
    ranks: int
    backend: str | None  # name to give to the library, in the library's way; None: its default
    group: str | None  # backend of a group that the program forms before it calls the library
    rest: list[str]  # the program's own arguments


def options() -> Options:
    """Parse the command line, and form the process group of --group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--backend")
    parser.add_argument("--group")
    arguments, rest = parser.parse_known_args()
    if arguments.group:
        dist.init_process_group(arguments.group)
    return Options(**vars(arguments), rest=rest)


def write(
    folder: Path,
    losses: Sequence[float],
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    **more: Any,
) -> None:
    """Write rank*.pt: the losses, the module's weights, and the backend that reduced gradients.

    Args:
        losses: one per step
        module: the trained module, as the library wrapped it
        group: the group that reduces gradients; default: the group of the DDP in `module`, which
            must have one
        more: other numbers to compare
    """
    if group is None:
        group = data_parallel(module).process_group
    backend = group._get_backend(torch.device("cpu"))
    shown = {
        "backend": type(backend).__name__,
        "reported": dist.get_backend(group) if dist.is_initialized() else backend.name(),
        "size": group.size(),
        "numbers": {
            "losses": torch.tensor(losses, dtype=torch.float64),
            "weights": nn.utils.parameters_to_vector(module.parameters()).detach().clone(),
            **{name: torch.as_tensor(value) for name, value in more.items()},
        },
    }
    torch.save(shown, folder / f"rank{group.rank()}.pt")


def data_parallel(module: nn.Module) -> DistributedDataParallel:
    """Return the DDP that `module` is or contains. Raises AssertionError unless there is one."""
    found = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    assert len(found) == 1, f"{type(module).__name__} contains {len(found)} DDP modules, not 1"
    return found[0]
