"""Gradients on their way from all workers to the server, where their average lies in .grad then."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm.parameter_server.sync_agreement import Terms
from torch_hbmcomm.parameter_server.sync_buckets import Bucket
from torch_hbmcomm.parameter_server.sync_channel import Channel
from torch_hbmcomm.parameter_server.sync_drop import Dropping
from torch_hbmcomm.parameter_server.sync_gradients import (
    Gradients,
    average,
    average_parts,
    prepare_averages,
)
from torch_hbmcomm.parameter_server.sync_round import Call, Round, tell


class Gathered(NamedTuple):
    """parameters: indices of those that have an average. nbytes: that this rank sent."""

    parameters: Sequence[int]
    nbytes: int


class Gather:
    """A call is a collective. What one rank does not send counts as zeros."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        terms: Terms,
        parameters: Sequence[nn.Parameter],
        channel: Channel,
        dropping: Dropping | None,
    ) -> None:
        self._group = group
        self._terms = terms
        self._parameters = parameters
        self._channel = channel
        self._dropping = dropping

    def __call__(self, agreed: Round, gradients: Gradients) -> Gathered:
        """REQUIRES: an update that no broken gradient prevents."""
        if self._dropping is None:
            return self._all(agreed, gradients)
        return self._chosen(agreed, gradients, self._dropping)

    def _all(self, agreed: Round, gradients: Gradients) -> Gathered:
        """Every worker sends all parameters that have a gradient on any."""
        indices = agreed.parameters
        rooms = self._rooms(indices)

        def receive(bucket: Bucket, rows: list[torch.Tensor]) -> None:
            average(bucket, [rows[rank] for rank in agreed.workers], agreed.batches, rooms)

        like = [self._parameters[index] for index in indices]
        return Gathered(indices, self._channel.gather(gradients.flats(indices), like, receive))

    def _chosen(self, agreed: Round, gradients: Gradients, dropping: Dropping) -> Gathered:
        """Every worker sends what it alone chooses."""
        everything = range(len(self._parameters))
        batches = agreed.batches
        if agreed.call == Call.FLUSH:  # weighs as much as in an update before
            batches = len(agreed.workers) * self._terms.push_every
        if self._group.rank() not in agreed.workers:
            chosen = [False] * len(everything)
        elif agreed.call == Call.FLUSH:
            chosen = dropping.flush()
        else:
            chosen = dropping.choose(gradients.flats(everything))
        table = tell(self._group, chosen)
        indices = [index for index in everything if any(flags[index] for flags in table)]
        brings = [[flags[index] for index in indices] for flags in table]
        receive = partial(average_parts, divisor=batches, flats=self._rooms(indices))
        like = [self._parameters[index] for index in indices]
        nbytes = self._channel.gather_some(like, brings, dropping.packer(indices), receive)
        dropping.end_round()
        return Gathered(indices, nbytes)

    def _rooms(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """At the server."""
        if self._group.rank() != self._terms.server:
            return []
        return prepare_averages(self._parameters, indices)
