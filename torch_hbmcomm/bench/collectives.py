"""What is measured: the names of the collectives, and the cells that a run consists of.

A size is that of the larger buffer of a rank: the whole tensor of allreduce, broadcast, reduce and
sendrecv; the gathered side of allgather and gather; the scattered side of scatter and
reduce_scatter; either side of alltoall. Rank 0 is the root. Operators are sums.

sendrecv is a ping-pong of the pairs (0, 1), (2, 3), ...: one call is both ways; an odd last rank
idles. allreduce_native is allreduce called in a loop of C++, under Python and the dispatcher: it
compares what lies below them, which at small sizes they hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_hbmcomm.bench.sizes import KIB, MIB, format_bytes

DTYPES = ("float32", "float64", "float16", "bfloat16")
NATIVE = "allreduce_native"
STARTUP = "startup"  # from nothing to the end of a first collective; measured apart

_LARGE = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_SMALL = (8, 512, 4 * KIB, 16 * KIB, 64 * KIB)


@dataclass(frozen=True)
class Collective:
    name: str
    default_sizes: Sequence[int] = _LARGE  # none for a collective that moves no data
    divided: bool = False  # the larger buffer holds one equal share for each rank

    def bytes_near(self, asked: int, ranks: int, dtype: str) -> int:
        """The least possible size from `asked` up."""
        element: int = getattr(torch, dtype).itemsize
        step = element * (ranks if self.divided else 1)
        return -(-asked // step) * step


@dataclass(frozen=True)
class Cell:
    """One row of the report: every contender that offers it does this."""

    collective: str
    dtype: str
    bytes: int  # 0: no data

    def __str__(self) -> str:
        if not self.bytes:
            return self.collective
        return f"{self.collective} of {format_bytes(self.bytes)} of {self.dtype}"


def cells(
    collective: Collective, sizes: Sequence[int] | None, dtypes: Sequence[str], ranks: int
) -> list[Cell]:
    """Sizes None: the collective's own. Those that round to the same possible one come once."""
    if not collective.default_sizes:
        return [Cell(collective.name, dtypes[0], 0)]
    found = [
        Cell(collective.name, dtype, collective.bytes_near(size, ranks, dtype))
        for dtype in dtypes
        for size in (collective.default_sizes if sizes is None else sizes)
    ]
    return list(dict.fromkeys(found))


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("allreduce", (*_SMALL, 256 * KIB, *_LARGE, 256 * MIB)),
        Collective(NATIVE, _SMALL),
        Collective("broadcast"),
        Collective("reduce"),
        Collective("allgather", divided=True),
        Collective("gather", divided=True),
        Collective("scatter", divided=True),
        Collective("reduce_scatter", divided=True),
        Collective("alltoall", divided=True),
        Collective("barrier", default_sizes=()),
        Collective("sendrecv"),
    )
}
