"""Gradients of one update: a worker adds up the gradients of its steps, and the server gathers and
averages the workers' sums into its model's .grad.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_hbmcomm.parameter_server.config import SyncConfig
from torch_hbmcomm.parameter_server.packing import Span, parts_of
from torch_hbmcomm.parameter_server.sync_agreement import (
    Offer,
    SyncCall,
    SyncRound,
    exchange_ages,
)
from torch_hbmcomm.parameter_server.sync_channel import Bucket, Parts, SyncChannel
from torch_hbmcomm.parameter_server.sync_drop import SyncLayerDrop
from torch_hbmcomm.tensors import flat, is_finite

_HALF = (torch.float16, torch.bfloat16)


class Gradients:
    """The gradients that a worker has not sent yet: of one step, or the sums over several."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.clear()

    @property
    def batches(self) -> int:
        return self._batches

    def clear(self) -> None:
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._changed: str | None = None
        self._sparse: int | None = None
        self._batches = 0

    def add(self, changed: str | None) -> None:
        """Add the gradients of a step to the sums. The sums keep a parameter's first gradient by
        reference, so call release() before the next backward pass if more steps will be added.

        changed: the error if the model has changed since the start; the next round raises it, and
        until then nothing is added
        """
        self._batches += 1
        self._changed = self._changed or changed
        if self._changed is not None:
            return
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.detach()
            held = self._sums[index]
            if gradient.layout != torch.strided:
                self._sparse = index if self._sparse is None else min(index, self._sparse)
            elif held is None:
                self._sums[index] = _as_in_memory(gradient, parameter)
            else:
                held.add_(gradient)

    def release(self) -> None:
        """Keep the next backward pass from writing to the held gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def offer(self, call: SyncCall, changed: str | None) -> Offer:
        """Return this rank's contribution to a round. changed: as in add()."""
        gradients = enumerate(self._sums)
        broken = (i for i, sum_ in gradients if sum_ is not None and not is_finite(sum_))
        return Offer(
            call=call,
            batches=self._batches,
            changed=self._changed or changed,
            sparse=self._sparse,
            broken=next(broken, None),
            has_gradient=[sum_ is not None for sum_ in self._sums],
        )

    def flats(self, indices: Sequence[int]) -> list[torch.Tensor | None]:
        """Return the gradients of some parameters, flat; None for a parameter without one."""
        sums = [self._sums[index] for index in indices]
        return [None if sum_ is None else flat(sum_) for sum_ in sums]


class Gathered(NamedTuple):
    """The outcome of a gather.

    parameters: indices of the parameters that have an average
    nbytes: bytes that this rank sent
    ages: for each of these parameters, and each worker that sent it: the number of steps whose
        gradients the worker sent; empty without layer dropping
    """

    parameters: Sequence[int]
    nbytes: int
    ages: Sequence[Sequence[int]] = ()


class GradientGather:
    """Averages the workers' gradients at the server. Unsent gradients count as zeros."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: SyncConfig,
        parameters: Sequence[torch.Tensor],
        channel: SyncChannel,
        dropping: SyncLayerDrop | None,
    ) -> None:
        self._group = group
        self._config = config
        self._parameters = parameters
        self._channel = channel
        self._dropping = dropping

    def gather(self, agreed: SyncRound, gradients: Gradients) -> Gathered:
        """Average gradients at the server. Collective.

        REQUIRES: `agreed` is an update, and no gradient in it is broken.
        """
        if self._dropping is None:
            return self._all(agreed, gradients)
        return self._chosen(agreed, gradients, self._dropping)

    def _all(self, agreed: SyncRound, gradients: Gradients) -> Gathered:
        """Send the gradients of all parameters that have a gradient on any worker."""
        indices = agreed.parameters
        rooms = self._rooms(indices)

        def receive(bucket: Bucket, rows: list[torch.Tensor]) -> None:
            _average(bucket, [rows[rank] for rank in agreed.workers], agreed.batches, rooms)

        like = [self._parameters[index] for index in indices]
        return Gathered(indices, self._channel.gather(gradients.flats(indices), like, receive))

    def _chosen(self, agreed: SyncRound, gradients: Gradients, dropping: SyncLayerDrop) -> Gathered:
        """Send the gradients or residuals of the parameters that each worker has chosen."""
        everything = range(len(self._parameters))
        batches = agreed.batches
        if agreed.call == SyncCall.FLUSH:
            # FLUSH counts no batches. Divide as in an update with `push_every` batches a worker.
            batches = len(agreed.workers) * self._config.push_every
        if self._group.rank() not in agreed.workers:
            chosen = [0] * len(everything)
        elif agreed.call == SyncCall.FLUSH:
            chosen = dropping.flush()
        else:
            chosen = dropping.choose(gradients.flats(everything))
        table = exchange_ages(self._group, chosen)
        indices = [index for index in everything if any(ages[index] for ages in table)]
        brings = [[ages[index] > 0 for index in indices] for ages in table]
        receive = partial(_average_parts, divisor=batches, flats=self._rooms(indices))
        like = [self._parameters[index] for index in indices]
        nbytes = self._channel.gather_some(like, brings, dropping.packer(indices), receive)
        dropping.end_round()
        arrived = [[ages[index] for ages in table if ages[index] > 0] for index in indices]
        return Gathered(indices, nbytes, arrived)

    def _rooms(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Allocate memory for the averages, on the server only."""
        if self._group.rank() != self._config.server:
            return []
        return _prepare_averages(self._parameters, indices)


def _prepare_averages(
    parameters: Sequence[torch.Tensor], indices: Sequence[int]
) -> list[torch.Tensor]:
    """Allocate the .grad of the parameters of these indices, and remove all other .grad.

    An optimizer does not change a parameter without .grad. Returns the .grad tensors, flat.
    """
    named = set(indices)
    for index, parameter in enumerate(parameters):
        if index not in named:
            parameter.grad = None
        elif parameter.grad is None or not _is_like(parameter.grad, parameter):
            parameter.grad = torch.empty_like(parameter)
    gradients = (parameters[index].grad for index in indices)
    return [flat(gradient) for gradient in gradients if gradient is not None]


def _average(
    bucket: Bucket, rows: Sequence[torch.Tensor], divisor: int, flats: Sequence[torch.Tensor]
) -> None:
    """Add the rows in their order, and write the sum / divisor to `flats`. Overwrites rows[0]."""
    total = _sum(rows)
    for target, at in parts_of(bucket.spans, flats):
        torch.div(total[at], divisor, out=target)


def _average_parts(arrived: Parts, divisor: int, flats: Sequence[torch.Tensor]) -> None:
    """Average the parts of the ranks. A span that a rank has not sent counts as zeros."""
    found: dict[Span, list[torch.Tensor]] = {}
    for bucket, row in arrived:
        lengths = [span.length for span in bucket.spans]
        for span, values in zip(bucket.spans, row.split(lengths), strict=True):
            found.setdefault(span, []).append(values)
    for (tensor, start, stop), summands in found.items():
        torch.div(_sum(summands), divisor, out=flats[tensor][start:stop])


def check_averages(
    names: Sequence[str], parameters: Sequence[torch.Tensor], cache_dtype: torch.dtype | None
) -> None:
    """Raise OverflowError if a float16 average is not finite: a sum over many steps may exceed
    float16. Other averages are not checked."""
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.grad is None or torch.float16 not in (parameter.dtype, cache_dtype):
            continue
        if not is_finite(parameter.grad):
            raise OverflowError(
                f"the accumulated gradient of parameter {name} is beyond float16: choose a wider "
                "type for the parameter and for LayerDrop(cache_dtype=...), or a smaller max_age"
            )


def _sum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the rows, added in their order. Half types are added in float32. May
    overwrite the first row."""
    first = rows[0]
    total = first.to(torch.float32) if first.dtype in _HALF else first
    for row in rows[1:]:
        total.add_(row)
    return total


def _is_like(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    return gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride()


def _as_in_memory(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient, with its elements in the memory order of the parameter's elements."""
    if _is_like(gradient, parameter):
        return gradient
    return torch.empty_like(parameter.detach()).copy_(gradient)
