"""What the source publishes: its parameters, and the totals that are applied in them.

The two belong together: who takes both goes on as the source would. A version, which is odd while
they are being written, tells readers whether they have seen a whole one (a sequence lock).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torch_hbmcomm.async_ddp.job import Job
from torch_hbmcomm.async_ddp.places import Space
from torch_hbmcomm.async_ddp.spread import Spread, wire_dtype


@dataclass(frozen=True)
class Replica:
    """By the dtype of the parameters, in the order of its space; half types as float32."""

    weights: dict[torch.dtype, torch.Tensor]
    applied: dict[torch.dtype, torch.Tensor]


class Publication:
    """Of one source; for any number of readers, each of which notes which version it has.

    Threads: one at a time.
    """

    def __init__(self, job: Job, spaces: Mapping[torch.dtype, Space]) -> None:
        self._taken = 0
        self._version = job.alloc(0, 8, "version")
        self._weights = {
            dtype: Spread(job, space, wire_dtype(dtype), f"weights/{dtype}")
            for dtype, space in spaces.items()
        }
        self._applied = {
            dtype: Spread(job, space, torch.float64, f"applied/{dtype}")
            for dtype, space in spaces.items()
        }

    def give(self, replica: Replica) -> None:
        self._version.fetch_add(0, 1)
        for dtype in self._weights:
            self._weights[dtype].write_all(replica.weights[dtype])
            self._applied[dtype].write_all(replica.applied[dtype])
        self._version.fetch_add(0, 1)

    def take(self) -> Replica | None:
        """None if there is no newer one, or if it is being written."""
        version = self._version.fetch_add(0, 0)
        if version == self._taken or version % 2:
            return None
        found = Replica(
            {dtype: spread.read_all() for dtype, spread in self._weights.items()},
            {dtype: spread.read_all() for dtype, spread in self._applied.items()},
        )
        if self._version.fetch_add(0, 0) != version:
            return None
        self._taken = version
        return found
