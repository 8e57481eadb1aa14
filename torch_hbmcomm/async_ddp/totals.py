"""The running totals of gradients, and what of them this worker has applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_hbmcomm import smb
from torch_hbmcomm.async_ddp.job import Job
from torch_hbmcomm.async_ddp.places import LONGEST_RUN, Piece, Space
from torch_hbmcomm.async_ddp.spread import Spread, wait, wire_dtype


class Totals:
    """Of the gradients of one dtype; half types travel as float32.

    push() adds this worker's gradients to the totals in the boxes. take() yields the mean over
    `workers` of what was added, by anybody, since this worker looked last, and notes as applied
    exactly what it yields: what rounding to the gradients' dtype leaves is yielded the next time.

    Threads: one at a time.
    """

    def __init__(self, job: Job, space: Space, dtype: torch.dtype, workers: int) -> None:
        self.space = space
        self.applied = torch.zeros(space.count, dtype=torch.float64)
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self._workers = workers
        self._wire = wire_dtype(dtype)
        self._scratch = torch.empty(min(LONGEST_RUN, space.count), dtype=torch.float64)
        self._bounds = torch.finfo(dtype)
        self._totals = Spread(job, space, torch.float64, f"totals/{dtype}")
        self._slot = Spread(job, space, self._wire)

    def push(self, gradients: torch.Tensor, pieces: Sequence[Piece]) -> list[list[smb.Future]]:
        """A bucket's gradients. What it returns is take()'s."""
        under_way = []
        for piece in pieces:
            slot = self._slot.local(piece)
            for run in piece.runs:
                place = slot[run.begin - piece.begin :][: run.count]
                place.copy_(gradients[run.at : run.at + run.count])
            under_way.append([*self._add(piece), *self._totals.read(piece)])
        return under_way

    def take(
        self,
        gradients: torch.Tensor,
        pieces: Sequence[Piece],
        under_way: Sequence[Sequence[smb.Future]],
    ) -> None:
        """Into the bucket, piece by piece as they come."""
        for piece, futures in zip(pieces, under_way, strict=True):
            wait(futures)
            totals = self._totals.local(piece)
            self.pulled_bytes += totals.nbytes
            for run in piece.runs:
                self._yield(
                    totals[run.begin - piece.begin :][: run.count],
                    self.applied[run.begin : run.begin + run.count],
                    gradients[run.at : run.at + run.count],
                )

    def take_all(self, gradients: torch.Tensor) -> None:
        """As take(), of everything in the order of the space, with nothing pushed before."""
        pieces = self.space.whole()
        self.take(gradients, pieces, [self._totals.read(piece) for piece in pieces])

    def outstanding(self) -> torch.Tensor:
        """The mean over the workers of what this one has not applied, in the order of the space."""
        return self._totals.read_all().sub_(self.applied).div_(self._workers)

    def owe(self, outstanding: torch.Tensor) -> None:
        """The next yields have this besides, as outstanding() returned it."""
        self.applied.sub_(outstanding, alpha=self._workers)

    def _add(self, piece: Piece) -> list[smb.Future]:
        offset, size = self._totals.bytes_of(piece)
        source_offset, source_size = self._slot.bytes_of(piece)
        self.pushed_bytes += source_size
        added = self._totals.segments[piece.box].accumulate_async
        return [
            *self._slot.write(piece),
            added(
                self._slot.segments[piece.box],
                torch.float64,
                offset=offset,
                size=size,
                source_offset=source_offset,
                source_dtype=self._wire,
            ),
        ]

    def _yield(self, totals: torch.Tensor, applied: torch.Tensor, gradients: torch.Tensor) -> None:
        mean = torch.sub(totals, applied, out=self._scratch[: len(totals)]).div_(self._workers)
        gradients.copy_(mean.clamp_(self._bounds.min, self._bounds.max))
        applied.add_(gradients, alpha=self._workers)
