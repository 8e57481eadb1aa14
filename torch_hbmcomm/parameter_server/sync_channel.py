"""Moves tensors between the server and the others, bucket by bucket, over the group's gather and
broadcast. While a bucket is on its way, the one before it is unpacked or averaged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist

from torch_hbmcomm import memory
from torch_hbmcomm.parameter_server.sync_buckets import Bucket, cut

_IN_FLIGHT = 2  # buckets
BUCKET_BYTES = (25 << 20) // _IN_FLIGHT
_ALIGNMENT = 64  # bytes

Receive = Callable[[Bucket, list[torch.Tensor]], None]
_Transfer = tuple[dist.Work, Callable[[], object]]  # and what to do once it is done


class Channel:
    """The buffers of one rank: 25 MiB, and on the server 25 MiB for each rank of the group besides;
    less for a model that is smaller. Those of an hbm group lie in its segment, so that nothing is
    staged on the way.

    Every method is a collective. Used from one thread.
    """

    def __init__(self, group: dist.ProcessGroup, server: int, total_bytes: int) -> None:
        """total_bytes: of all tensors that will travel at once, at most."""
        self._group = group
        self._server = server
        size = min(BUCKET_BYTES, total_bytes)
        self._bytes = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._slots = [_buffer(group, (self._bytes,)) for _ in range(_IN_FLIGHT)]
        rows = (group.size(), self._bytes)
        at_server = group.rank() == server
        self._rows = [_buffer(group, rows) for _ in range(_IN_FLIGHT)] if at_server else []

    def broadcast(self, flats: Sequence[torch.Tensor], source: int) -> int:
        """Everyone's `flats` become those of the rank `source`. Returns bytes."""
        sends = self._group.rank() == source

        def start() -> Iterator[_Transfer]:
            for bucket, slot in zip(cut(flats, self._bytes), cycle(self._slots), strict=False):
                wire = slot[: bucket.nbytes]
                values = wire.view(bucket.dtype)
                if sends:
                    bucket.pack(values, flats)
                work = dist.broadcast(wire, group=self._group, group_src=source, async_op=True)
                yield work, _nothing if sends else partial(bucket.unpack, values, flats)

        _pipeline(start())
        return _total(flats)

    def gather(
        self,
        flats: Sequence[torch.Tensor | None],
        like: Sequence[torch.Tensor],
        receive: Receive,
    ) -> int:
        """Brings everyone's `flats` to the server: there receive(bucket, rows) is called for each
        bucket, rows being the elements of every rank, which it may overwrite.

        None counts as zeros; `like` has the sizes and the dtypes. Returns bytes of one rank.
        """

        def start() -> Iterator[_Transfer]:
            rooms: list[torch.Tensor | None] = [*self._rows] or [None]
            for bucket, slot, room in zip(
                cut(like, self._bytes), cycle(self._slots), cycle(rooms), strict=False
            ):
                wire = slot[: bucket.nbytes]
                bucket.pack(wire.view(bucket.dtype), flats)
                rows = None if room is None else list(room[:, : bucket.nbytes])
                work = dist.gather(
                    wire, rows, group=self._group, group_dst=self._server, async_op=True
                )
                if rows is None:
                    yield work, _nothing
                else:
                    yield work, partial(receive, bucket, [row.view(bucket.dtype) for row in rows])

        _pipeline(start())
        return _total(like)


def _nothing() -> None:
    pass


def _pipeline(transfers: Iterator[_Transfer]) -> None:
    """Ends each transfer in turn, and has at most _IN_FLIGHT started: those use buffers in turn."""
    flying: deque[_Transfer] = deque()

    def land() -> None:
        work, end = flying.popleft()
        work.wait()
        end()

    for transfer in transfers:
        flying.append(transfer)
        if len(flying) == _IN_FLIGHT:
            land()
    while flying:
        land()


def _buffer(group: dist.ProcessGroup, shape: tuple[int, ...]) -> torch.Tensor:
    if group._get_backend(torch.device("cpu")).name() == "hbm":
        return memory.empty(shape, torch.uint8)
    return torch.empty(shape, dtype=torch.uint8)


def _total(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
