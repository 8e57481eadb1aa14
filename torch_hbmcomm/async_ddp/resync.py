"""Versions of the parameters of one rank, the source. The source publishes a version in the boxes,
and each other rank takes the version between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from torch_hbmcomm.async_ddp.layout import FlatLayout
from torch_hbmcomm.async_ddp.parameters import Parameters
from torch_hbmcomm.async_ddp.totals import Totals
from torch_hbmcomm.parameter_server.sharding import JobSegments, ShardedValues
from torch_hbmcomm.pipeline import TaskPipeline


@dataclass(frozen=True)
class SourceVersion:
    """The source's parameters (`weights`), and the totals that they include (`applied`).

    A rank that takes both continues as the source would. Both have a flat tensor for each dtype of
    the parameters. Weights of half types are float32; `applied` is always float64.
    """

    weights: dict[torch.dtype, torch.Tensor]
    applied: dict[torch.dtype, torch.Tensor]


class Publication:
    """The version that the source has published last, for any number of readers.

    A number in a box detects torn reads: it is odd while the source writes a version (a sequence
    lock). Each reader remembers the number of the version that it took last.

    Threads: one at a time.
    """

    def __init__(self, segments: JobSegments, layouts: Mapping[torch.dtype, FlatLayout]) -> None:
        self._taken = 0
        self._number = segments.alloc(0, 8, "version")
        self._layouts = layouts
        self._weights = {
            dtype: ShardedValues(segments, layout.weights, f"weights/{dtype}")
            for dtype, layout in layouts.items()
        }
        self._applied = {
            dtype: ShardedValues(segments, layout.totals, f"applied/{dtype}")
            for dtype, layout in layouts.items()
        }

    def give(self, version: SourceVersion) -> None:
        """Publish a version. Waits."""
        self._number.fetch_add(0, 1)
        for dtype, layout in self._layouts.items():
            layout.write(self._weights[dtype], version.weights[dtype])
            layout.write(self._applied[dtype], version.applied[dtype])
        self._number.fetch_add(0, 1)

    def take(self) -> SourceVersion | None:
        """Return the newest version. Returns None if there is none, if this reader has it already,
        or if the source is writing a version during the call. Waits."""
        number = self._number.fetch_add(0, 0)
        if number == self._taken or number % 2:
            return None
        found = SourceVersion(
            {dtype: s.read(self._weights[dtype]) for dtype, s in self._layouts.items()},
            {dtype: s.read(self._applied[dtype]) for dtype, s in self._layouts.items()},
        )
        if self._number.fetch_add(0, 0) != number:
            return None
        self._taken = number
        return found


class Resync:
    """Gives a version every `every` steps, on the source. Takes the newest version on other ranks.

    Training does not wait: giving and fetching run in the pipeline, and a fetched version becomes
    the reader's parameters when the reader begins a step.

    Threads: only the training thread calls the methods.
    """

    def __init__(
        self,
        publication: Publication,
        parameters: Parameters,
        totals: Mapping[torch.dtype, Totals],
        pipeline: TaskPipeline,
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
        self._due = False  # True: from the end of a backward() until begin_step()
        self._poll: Future[SourceVersion | None] | None = None

    def begin_step(self, steps: int) -> None:
        """Give or take a version, if a backward() has ended since the last call.

        The source gives a version, if one is due after `steps` steps. Another rank takes the
        version that the poll of end_backward() has found, if there is one.

        REQUIRES: this rank has applied all gradients that it took in these steps.
        """
        if not self._due:
            return
        self._due = False
        if self._is_source:
            if steps >= self._next:
                self._next = steps + self._every
                # The pipeline gives the version before it exchanges the next gradients, and until
                # then the parameters do not change.
                self._pipeline.submit(lambda: None, lambda _: self._give())
        elif self._poll is not None and self._poll.done():
            self.settle()

    def end_backward(self) -> None:
        """Start to poll for a new version in the pipeline. Does nothing on the source, or while a
        poll's result has not been taken."""
        self._due = True
        if not self._is_source and self._poll is None:
            self._poll = self._pipeline.submit(lambda: None, lambda _: self._publication.take())

    def settle(self) -> None:
        """Take the version that end_backward() polls for, if there is any. Waits."""
        if self._poll is not None:
            poll, self._poll = self._poll, None
            self._adopt(poll.result())

    def align(self) -> None:
        """On the source, give a version now, and wait until the boxes have it. On other ranks, do
        nothing."""
        if self._is_source:
            self._pipeline.call(self._give)

    def take(self) -> bool:
        """Take the newest version now, and wait. Returns False if there is no version that is new
        to this rank. The source takes nothing, and returns True."""
        return self._is_source or self._adopt(self._pipeline.call(self._publication.take))

    def _give(self) -> None:
        applied = {dtype: totals.applied for dtype, totals in self._totals.items()}
        self._publication.give(SourceVersion(self._parameters.weights(), applied))

    def _adopt(self, version: SourceVersion | None) -> bool:
        if version is None:
            return False
        self._parameters.set_weights(version.weights)
        for dtype, applied in version.applied.items():
            self._totals[dtype].applied = applied
        self.count += 1
        return True
