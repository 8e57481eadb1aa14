"""Which layers changed: a counter for each, in a box.

A worker adds to the weights first and raises the version then; it looks at the versions first and
reads weights then. So a change that is missed is seen the next time, and none is missed for good.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch

from torch_hbmcomm import smb

COUNTER_BYTES = 8  # a signed 64-bit number


class Versions:
    """Raises MemoryError when the box is too small; smb.BoxError."""

    def __init__(
        self, box: smb.Box, name: str, layers: int, mode: Literal["auto", "attach"], temporary: bool
    ) -> None:
        self._box = box
        self._size = layers * COUNTER_BYTES
        self._counters = box.alloc(self._size, f"{name}/versions", mode, temporary)
        self._increments = box.alloc(self._size, temporary=True)  # what this worker adds
        self._seen = torch.zeros(layers, dtype=torch.int64)
        self.pushed_bytes = 0
        self.pulled_bytes = 0

    def changed(self) -> set[int]:
        """The layers that others have raised since the last call."""
        now = torch.empty_like(self._seen)
        self._counters.read(into=now)
        self.pulled_bytes += self._size
        if self._box.transport == "shm":  # a plain load: a question orders it before what follows
            self._counters.fetch_add(0, 0)
        changed = (now != self._seen).nonzero().flatten().tolist()
        self._seen = now
        return set(changed)

    def bump(self, layers: Collection[int]) -> None:
        """Raises the versions of layers whose change is in the weights. Waits."""
        increments = torch.zeros_like(self._seen)
        increments[list(layers)] = 1
        with self._box.batch() as batch:
            batch.write(self._increments, source=increments)
            batch.accumulate(self._counters, self._increments, "int64")
        self.pushed_bytes += self._size
        self._seen += increments

    def close(self) -> None:
        self._increments.delete()
        self._counters.free()
