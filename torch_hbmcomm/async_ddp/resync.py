"""Versions of the source's parameters, given and taken between this rank's steps."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import torch

from torch_hbmcomm.async_ddp.parameters import Parameters
from torch_hbmcomm.async_ddp.pipeline import Pipeline
from torch_hbmcomm.async_ddp.publication import Publication, Replica
from torch_hbmcomm.async_ddp.totals import Totals


class Resync:
    """The source gives a version every `every` of its steps; the others take those that they find.

    Neither waits in training: both go through the pipeline, and what a reader has fetched becomes
    its parameters when it begins a step.

    Threads: one at a time, the one that trains.
    """

    def __init__(
        self,
        publication: Publication,
        parameters: Parameters,
        totals: Mapping[torch.dtype, Totals],
        pipeline: Pipeline,
        every: int,
        is_source: bool,
    ) -> None:
        self.count = 0  # versions taken
        self._publication = publication
        self._parameters = parameters
        self._totals = totals
        self._pipeline = pipeline
        self._every = every
        self._next = every
        self._is_source = is_source
        self._due = False  # once between a backward() and the next
        self._look: Future[Replica | None] | None = None

    def begin_step(self, steps: int) -> None:
        """After so many steps, when all that was yielded in them has been applied."""
        if not self._due:
            return
        self._due = False
        if self._is_source:
            if steps >= self._next:
                self._next = steps + self._every
                # The parameters stay as they are until gradients come, which come behind this.
                self._pipeline.submit(lambda: None, lambda _: self._give())
        elif self._look is not None and self._look.done():
            self.settle()

    def end_backward(self) -> None:
        self._due = True
        if not self._is_source and self._look is None:
            self._look = self._pipeline.submit(lambda: None, lambda _: self._publication.take())

    def settle(self) -> None:
        """Takes what end_backward() looks for, if there is any. Waits."""
        if self._look is not None:
            look, self._look = self._look, None
            self._adopt(look.result())

    def align(self) -> None:
        """The source gives a version now. Waits."""
        if self._is_source:
            self._pipeline.call(self._give)

    def take(self) -> bool:
        """Whether there is a version that this rank had not; it has it then. Waits."""
        return self._is_source or self._adopt(self._pipeline.call(self._publication.take))

    def _give(self) -> None:
        applied = {dtype: totals.applied for dtype, totals in self._totals.items()}
        self._publication.give(Replica(self._parameters.weights(), applied))

    def _adopt(self, replica: Replica | None) -> bool:
        if replica is None:
            return False
        self._parameters.set_weights(replica.weights)
        for dtype, applied in replica.applied.items():
            self._totals[dtype].applied = applied
        self.count += 1
        return True
