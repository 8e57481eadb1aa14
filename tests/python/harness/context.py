"""The rank that a test function runs in, and the settings that the environment asks for."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

# The backend under test. "gloo" checks the tests themselves.
BACKEND = os.environ.get("HBMCOMM_TEST_BACKEND") or "hbm"

WORLD_SIZES = (1, 2, 3, 4, 8)

SHORT_TIMEOUT = 1.0  # seconds; timeout of the group in the pool of the fixture impatient_pool


def all_world_sizes() -> tuple[int, ...]:
    """Return the world sizes to test: all, or the one in HBMCOMM_TEST_RANKS."""
    chosen = os.environ.get("HBMCOMM_TEST_RANKS")
    return (int(chosen),) if chosen else WORLD_SIZES


@dataclass
class Context:
    """One rank of a pool. The default group is over BACKEND; `gloo` is a second group over Gloo."""

    rank: int
    size: int
    gloo: dist.ProcessGroup | None  # None in a bare pool, whose ranks have no group yet
    folder: Path  # shared by the ranks of this pool; other pools have other folders
    seed: int  # equal on every rank, new for every call
    device: str = "cpu"  # of the tensors that tests of any device use
    shared_random: random.Random = field(init=False)  # draws the same values on every rank
    own_random: random.Random = field(init=False)  # draws other values on every rank
    generator: torch.Generator = field(init=False)  # for data: other values on every rank

    def __post_init__(self) -> None:
        self.shared_random = random.Random(self.seed)
        self.own_random = random.Random(f"{self.seed}/{self.rank}")
        self.generator = torch.Generator().manual_seed(self.seed * 1009 + self.rank)
