"""The running totals of gradients, and the part of them that this worker has applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_hbmcomm.async_ddp.layout import LONGEST_RUN, FlatLayout, Run
from torch_hbmcomm.parameter_server.exchange import Arrival, Exchange
from torch_hbmcomm.parameter_server.layout import Piece
from torch_hbmcomm.parameter_server.sharding import JobSegments, Shards

_SCALES = {"parameter": 1.0}


@dataclass(frozen=True)
class PiecePlan:
    """A piece of a bucket, its slot, and the memory that its totals come to."""

    piece: Piece
    slot: torch.Tensor
    fresh: torch.Tensor
    runs: Sequence[Run]


class Totals:
    """The totals of the gradients of one dtype; half types are sent as float32.

    push() adds this worker's gradients to the totals in the boxes. take() puts into the bucket the
    mean over `workers` of all that was added since this worker took last. It notes as applied
    exactly the values that it has put there: the rounding errors of the gradients' dtype are taken
    the next time.

    Threads: one at a time.
    """

    def __init__(
        self, segments: JobSegments, layout: FlatLayout, dtype: torch.dtype, workers: int
    ) -> None:
        self.applied = torch.zeros(layout.count, dtype=torch.float64)
        self._layout = layout
        self._workers = workers
        self._scratch = torch.empty(min(LONGEST_RUN, layout.count), dtype=torch.float64)
        self._bounds = torch.finfo(dtype)
        self._shards = Shards(segments, layout.totals, f"totals/{dtype}")
        self._exchange = Exchange(segments, self._shards)

    @property
    def pushed_bytes(self) -> int:
        return self._exchange.pushed_bytes

    @property
    def pulled_bytes(self) -> int:
        return self._exchange.pulled_bytes

    def plan(self, names: Sequence[str]) -> list[PiecePlan]:
        """Plan a bucket with these parameters in this order, for push() and take()."""
        return [
            PiecePlan(
                piece,
                _tensor(self._exchange.slot(piece), piece.slot_dtype),
                _tensor(*self._exchange.fresh(piece)),
                runs,
            )
            for piece, runs in self._layout.bucket(names)
        ]

    def push(self, gradients: torch.Tensor, plan: Sequence[PiecePlan]) -> list[Arrival]:
        """Add a bucket's gradients. Returns the argument of take()."""
        return self._exchange.add(_filled(gradients, plan), _SCALES, fetch=True)

    def take(
        self, gradients: torch.Tensor, plan: Sequence[PiecePlan], arrivals: Sequence[Arrival]
    ) -> None:
        """Fill the bucket, piece by piece as they arrive."""
        for each, arrival in zip(plan, arrivals, strict=True):
            arrival.wait()
            for run in each.runs:
                self._take_run(
                    each.fresh[run.inside : run.inside + run.count],
                    self.applied[run.begin : run.begin + run.count],
                    gradients[run.at : run.at + run.count],
                )

    def take_all(self, gradients: torch.Tensor) -> None:
        """Fill `gradients`, a flat tensor. Waits."""
        plan = self.plan(list(self._layout.ranges))
        self.take(gradients, plan, self._exchange.fetch(each.piece for each in plan))

    def outstanding(self) -> torch.Tensor:
        """Return the mean over the workers of all that this one has not applied, flat."""
        return self._layout.read(self._shards).sub_(self.applied).div_(self._workers)

    def add_outstanding(self, outstanding: torch.Tensor) -> None:
        """Add the result of outstanding() to the next take()."""
        self.applied.sub_(outstanding, alpha=self._workers)

    def _take_run(
        self, totals: torch.Tensor, applied: torch.Tensor, gradients: torch.Tensor
    ) -> None:
        mean = torch.sub(totals, applied, out=self._scratch[: len(totals)]).div_(self._workers)
        gradients.copy_(mean.clamp_(self._bounds.min, self._bounds.max))
        applied.add_(gradients, alpha=self._workers)


def _filled(gradients: torch.Tensor, plan: Sequence[PiecePlan]) -> Iterator[Piece]:
    """Yield the pieces, with their gradients in the slots."""
    for each in plan:
        for run in each.runs:
            place = each.slot[run.inside : run.inside + run.count]
            place.copy_(gradients[run.at : run.at + run.count])
        yield each.piece


def _tensor(memory: memoryview, dtype: str) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=getattr(torch, dtype))
