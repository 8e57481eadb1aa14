"""The running totals of gradients, and what of them this worker has applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_hbmcomm import smb
from torch_hbmcomm.async_ddp.layout import (
    LONGEST_RUN,
    BlockCyclicLayout,
    BucketPiece,
    ShardedTensor,
    wire_dtype,
)
from torch_hbmcomm.parameter_server.sharding import JobSegments, wait_all


class Totals:
    """The totals of the gradients of one dtype; half types travel as float32.

    push() adds this worker's gradients to the totals in the boxes. take() puts into the bucket the
    mean over `workers` of what was added, by anybody, since this worker took last. It notes as
    applied exactly what it has put there: what rounding to the gradients' dtype leaves is taken the
    next time.

    Threads: one at a time.
    """

    def __init__(
        self, segments: JobSegments, layout: BlockCyclicLayout, dtype: torch.dtype, workers: int
    ) -> None:
        self.applied = torch.zeros(layout.count, dtype=torch.float64)
        self._layout = layout
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self._workers = workers
        self._scratch = torch.empty(min(LONGEST_RUN, layout.count), dtype=torch.float64)
        self._bounds = torch.finfo(dtype)
        self._totals = ShardedTensor(segments, layout, torch.float64, f"totals/{dtype}")
        self._slot = ShardedTensor(segments, layout, wire_dtype(dtype))

    def push(
        self, gradients: torch.Tensor, pieces: Sequence[BucketPiece]
    ) -> list[list[smb.Future]]:
        """Add a bucket's gradients. What it returns is for take()."""
        under_way = []
        for piece in pieces:
            slot = self._slot.local(piece)
            for run in piece.runs:
                place = slot[run.begin - piece.begin :][: run.count]
                place.copy_(gradients[run.at : run.at + run.count])
            self.pushed_bytes += slot.nbytes
            sent = self._slot.send(piece)
            added = self._totals.add(piece, self._slot)
            under_way.append([*sent, added, *self._totals.fetch(piece)])
        return under_way

    def take(
        self,
        gradients: torch.Tensor,
        pieces: Sequence[BucketPiece],
        under_way: Sequence[Sequence[smb.Future]],
    ) -> None:
        """Fill the bucket, piece by piece as they come."""
        for piece, futures in zip(pieces, under_way, strict=True):
            wait_all(futures)
            totals = self._totals.local(piece)
            self.pulled_bytes += totals.nbytes
            for run in piece.runs:
                self._take_run(
                    totals[run.begin - piece.begin :][: run.count],
                    self.applied[run.begin : run.begin + run.count],
                    gradients[run.at : run.at + run.count],
                )

    def take_all(self, gradients: torch.Tensor) -> None:
        """Fill `gradients`, which has every parameter, in the order of the layout. Waits."""
        pieces = self._layout.whole()
        self.take(gradients, pieces, [self._totals.fetch(piece) for piece in pieces])

    def outstanding(self) -> torch.Tensor:
        """Return the mean over the workers of what this one has not applied, in the order of the
        layout."""
        return self._totals.read_all().sub_(self.applied).div_(self._workers)

    def add_outstanding(self, outstanding: torch.Tensor) -> None:
        """Add what outstanding() has returned to what is taken next."""
        self.applied.sub_(outstanding, alpha=self._workers)

    def _take_run(
        self, totals: torch.Tensor, applied: torch.Tensor, gradients: torch.Tensor
    ) -> None:
        mean = torch.sub(totals, applied, out=self._scratch[: len(totals)]).div_(self._workers)
        gradients.copy_(mean.clamp_(self._bounds.min, self._bounds.max))
        applied.add_(gradients, alpha=self._workers)
