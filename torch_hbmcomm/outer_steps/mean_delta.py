"""The transfer of one fragment: from the deltas of all ranks to their mean.

A transfer is two sums over the ranks, which begin together. The *head* is small and has float64: a
number for each rank, which says how it takes part, then the averaged buffers and the counters. The
*code* has the deltas in the dtype on the wire.

With int8 the ranks first agree on a scale for each block, a power of two, by a maximum over the
ranks. The code begins when this maximum is there: at the next advance(). A rank sends at most
127 // ranks, so the sum of the codes is exact and the same in every order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_hbmcomm.tensors import power_of_two_above

_BLOCK = 1024  # elements with one scale
_HALF = 1 << 32  # a counter is sent as two numbers, because float64 has 53 bits


class Part(IntEnum):
    """How a rank takes part in a meeting."""

    DONE = 0  # the rank has closed, and has given all deltas
    GIVES = 1
    LAST = 2  # the rank has closed, and gives the delta of its last steps
    PASSES = 3  # the rank has closed, and has no steps in this fragment
    REFUSED = 4  # the delta is not finite

    @property
    def counts(self) -> bool:
        """True for a rank whose delta is in the mean."""
        return self in (Part.GIVES, Part.LAST)


class Arrived(NamedTuple):
    """The result of a transfer, equal on all ranks except `rest`.

    parts: by rank
    mean: the mean delta of the ranks that count; None: no rank counts
    buffers: the averages of the buffers, then the counters of rank 0, in float64 and int64
    rest: this rank's rounding errors; None: zeros
    sent_bytes: that this rank gave to all_reduce
    """

    parts: list[int]
    mean: torch.Tensor | None
    buffers: torch.Tensor
    counters: torch.Tensor
    rest: torch.Tensor | None
    sent_bytes: int


class MeanDelta:
    """The sums of a transfer that has begun. All ranks begin, advance and wait in the same order.

    Args:
        part: this rank's part; values count only if part.counts
        values: the delta, with the residual of earlier ones
        wire: the dtype on the wire
        levels: the largest code of int8
        buffers, counters: this rank's, flat, in float64 and int64
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        part: Part,
        values: torch.Tensor,
        wire: torch.dtype,
        levels: int,
        buffers: torch.Tensor,
        counters: torch.Tensor,
    ) -> None:
        self._group = group
        self._counts = part.counts
        self._values = values if part.counts else torch.zeros_like(values)
        self._wire = wire
        self._levels = levels
        self._sizes = [group.size(), buffers.numel(), counters.numel(), counters.numel()]
        parts = torch.zeros(group.size(), dtype=torch.float64)
        parts[group.rank()] = part
        own = [buffers if part.counts else torch.zeros_like(buffers)]
        high, low = counters.div(_HALF, rounding_mode="floor"), counters.remainder(_HALF)
        own += [half if group.rank() == 0 else torch.zeros_like(half) for half in (high, low)]
        self._head = torch.cat([parts, *(one.to(torch.float64) for one in own)])
        self._sent_bytes = 0
        self._works = [self._reduce(self._head)]
        self._scales: torch.Tensor | None = None
        self._code: torch.Tensor | None = None
        if wire == torch.int8:
            self._scales = _blocks(self._values).abs().amax(dim=1)
            self._works.append(self._reduce(self._scales, dist.ReduceOp.MAX))
        else:
            self._send(self._values.to(wire))

    def advance(self) -> None:
        """Begin the sum of the code, if it has not begun. With int8 it waits for the scales."""
        if self._code is not None:
            return
        assert self._scales is not None
        self._works.pop().wait()
        self._scales = power_of_two_above(self._scales / self._levels)
        code = _blocks(self._values).div(self._scales[:, None]).round_()
        code.clamp_(-self._levels, self._levels)
        self._send(code.flatten()[: self._values.numel()].to(torch.int8))

    def wait(self) -> Arrived:
        """Return the result. Raises the errors of the group."""
        self.advance()
        for work in self._works:
            work.wait()
        assert self._code is not None
        parts, buffers, high, low = self._head.split(self._sizes)
        numbers = [Part(int(number)) for number in parts]
        giving = sum(part.counts for part in numbers)
        counters = high.to(torch.int64) * _HALF + low.to(torch.int64)
        mean = self._decoded(self._code).div_(giving) if giving else None
        averages = buffers / max(giving, 1)
        return Arrived([*numbers], mean, averages, counters, self._rest, self._sent_bytes)

    def _send(self, code: torch.Tensor) -> None:
        self._rest = None
        if code.dtype != self._values.dtype and self._counts:
            self._rest = self._values - self._decoded(code)
        self._code = code
        self._works.append(self._reduce(code))

    def _decoded(self, code: torch.Tensor) -> torch.Tensor:
        values = code.to(self._values.dtype)
        if self._scales is None:
            return values
        return _blocks(values).mul(self._scales[:, None]).flatten()[: values.numel()]

    def _reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        self._sent_bytes += values.nbytes
        return dist.all_reduce(values, op, group=self._group, async_op=True)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Return the values as rows of _BLOCK elements, the last one filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
