"""Gradients on their way to one update: a worker adds up those of its steps, the server averages
those of the workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torch_hbmcomm.parameter_server.sync_buckets import Bucket, Parts, Span
from torch_hbmcomm.parameter_server.sync_round import Call, Offer
from torch_hbmcomm.parameter_server.tensors import flat, is_finite

_HALF = (torch.float16, torch.bfloat16)


class Gradients:
    """What a worker has not sent yet: the gradients of one step, or the sums over several."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.clear()

    @property
    def batches(self) -> int:
        return self._batches

    def clear(self) -> None:
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._sparse: int | None = None
        self._batches = 0

    def add(self) -> None:
        """Takes the gradients of a step, by reference where there is nothing to add them to."""
        self._batches += 1
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
        """The next backward pass shall not write to what is held."""
        for parameter in self._parameters:
            parameter.grad = None

    def offer(self, call: Call) -> Offer:
        gradients = enumerate(self._sums)
        broken = (i for i, sum_ in gradients if sum_ is not None and not is_finite(sum_))
        return Offer(
            call=call,
            batches=self._batches,
            sparse=self._sparse,
            broken=next(broken, None),
            has_gradient=[sum_ is not None for sum_ in self._sums],
        )

    def flats(self, indices: Sequence[int]) -> list[torch.Tensor | None]:
        """Those of the parameters named, None where there is none."""
        sums = [self._sums[index] for index in indices]
        return [None if sum_ is None else flat(sum_) for sum_ in sums]


def prepare_averages(
    parameters: Sequence[nn.Parameter], indices: Sequence[int]
) -> list[torch.Tensor]:
    """Makes room in the .grad of the parameters named, and removes that of the others: an
    optimizer leaves a parameter alone that has none. Returns the rooms, flat."""
    named = set(indices)
    for index, parameter in enumerate(parameters):
        if index not in named:
            parameter.grad = None
        elif parameter.grad is None or not _is_like(parameter.grad, parameter):
            parameter.grad = torch.empty_like(parameter)
    gradients = (parameters[index].grad for index in indices)
    return [flat(gradient) for gradient in gradients if gradient is not None]


def average(
    bucket: Bucket, rows: Sequence[torch.Tensor], divisor: int, flats: Sequence[torch.Tensor]
) -> None:
    """The sum of `rows`, in their order, over `divisor`, into `flats`. Overwrites the first row."""
    for piece, target in bucket.pieces(_sum(rows), flats):
        torch.div(piece, divisor, out=target)


def average_parts(parts: Parts, divisor: int, flats: Sequence[torch.Tensor]) -> None:
    """As average(), where a row lacks spans that another has: they count as zeros there."""
    found: dict[Span, list[torch.Tensor]] = {}
    for bucket, row in parts:
        lengths = [span.stop - span.start for span in bucket.spans]
        for span, piece in zip(bucket.spans, row.split(lengths), strict=True):
            found.setdefault(span, []).append(piece)
    for (tensor, start, stop), pieces in found.items():
        torch.div(_sum(pieces), divisor, out=flats[tensor][start:stop])


def check_averages(
    names: Sequence[str], parameters: Sequence[nn.Parameter], cache_dtype: torch.dtype | None
) -> None:
    """What was added up over many steps may be beyond float16, whose range is short, though all
    gradients were finite.

    Raises OverflowError: it is.
    """
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.grad is None or torch.float16 not in (parameter.dtype, cache_dtype):
            continue
        if not is_finite(parameter.grad):
            raise OverflowError(
                f"the accumulated gradient of parameter {name} is beyond float16: choose a wider "
                "type for the parameter and for LayerDrop(cache_dtype=...), or a smaller max_age"
            )


def _sum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """In their order; of halves in float32. May overwrite the first."""
    first = rows[0]
    total = first.to(torch.float32) if first.dtype in _HALF else first
    for row in rows[1:]:
        total.add_(row)
    return total


def _is_like(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    return gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride()


def _as_in_memory(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient, with its elements in the order of the parameter's."""
    if _is_like(gradient, parameter):
        return gradient
    return torch.empty_like(parameter.detach()).copy_(gradient)
