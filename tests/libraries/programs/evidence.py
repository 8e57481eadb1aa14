"""The options of a program, and what it reports to the test: numbers, and the backend they used."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Told:
    folder: Path  # where the evidence goes
    ranks: int
    backend: str | None  # to name to the library in its own way; None: whatever it takes by itself
    group: str | None  # backend of a group that the program forms before the library is asked
    rest: list[str]  # the program's own arguments


def told() -> Told:
    """Parse the command line; form the group that it asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--backend")
    parser.add_argument("--group")
    arguments, rest = parser.parse_known_args()
    if arguments.group:
        dist.init_process_group(arguments.group)
    return Told(**vars(arguments), rest=rest)


def write(
    folder: Path,
    losses: Sequence[float],
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    **more: Any,
) -> None:
    """Write rank*.pt: the losses, the module's weights, and the backend that reduced gradients.

    Args:
        losses: of the steps
        module: what was trained, as the library wrapped it
        group: the group that reduces gradients; default: that of the module's DDP, which must be
            there
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
    """Return the DDP that `module` is or holds; an AssertionError if there is none."""
    found = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    assert len(found) == 1, f"a {type(module).__name__} with {len(found)} DDP in it"
    return found[0]
