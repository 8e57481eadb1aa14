"""Moves tensors between the server and the others, bucket by bucket, over the group's gather and
broadcast, or point to point where ranks bring different tensors. While a bucket is on its way, the
one before it is unpacked or averaged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist

from torch_hbmcomm import memory
from torch_hbmcomm.parameter_server.sync_buckets import Bucket, Parts, cut

_IN_FLIGHT = 2  # buckets
BUCKET_BYTES = (25 << 20) // _IN_FLIGHT
_ALIGNMENT = 64  # bytes

Receive = Callable[[Bucket, list[torch.Tensor]], None]
Pack = Callable[[Bucket, torch.Tensor], None]
_Works = Sequence[dist.Work | None]  # None nowhere: this rank is in the group
_Transfer = tuple[_Works, Callable[[], object]]  # and what to do once it is done


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
                yield [work], _nothing if sends else partial(bucket.unpack, values, flats)

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
                    yield [work], _nothing
                else:
                    views = [row.view(bucket.dtype) for row in rows]
                    yield [work], partial(receive, bucket, views)

        _pipeline(start())
        return _total(like)

    def gather_some(
        self,
        like: Sequence[torch.Tensor],
        brings: Sequence[Sequence[bool]],
        pack: Pack,
        receive: Callable[[Parts], None],
    ) -> int:
        """Brings to the server what each rank has: tensor i of rank r if brings[r][i]. Nothing
        travels for the others.

        pack(part, wire) puts this rank's part of a bucket into `wire`, buckets and parts in order.
        At the server receive(parts) is called for each bucket with those of all ranks that have
        one, in the order of the ranks; it may overwrite them. Returns bytes of this rank.
        """
        rank = self._group.rank()
        rooms: list[torch.Tensor | None] = [*self._rows] or [None]

        def start() -> Iterator[_Transfer]:
            for bucket, slot, room in zip(
                cut(like, self._bytes), cycle(self._slots), cycle(rooms), strict=False
            ):
                parts = [bucket.only(chosen) for chosen in brings]
                if room is None:
                    yield self._send(parts[rank], slot, pack), _nothing
                else:
                    yield self._receive(parts, room, pack, receive)

        _pipeline(start())
        own = zip(like, brings[rank], strict=True)
        return _total([tensor for tensor, brought in own if brought])

    def _send(self, part: Bucket, slot: torch.Tensor, pack: Pack) -> _Works:
        if not part.spans:
            return []
        wire = slot[: part.nbytes]
        pack(part, wire.view(part.dtype))
        return [dist.isend(wire, group=self._group, group_dst=self._server)]

    def _receive(
        self,
        parts: Sequence[Bucket],
        room: torch.Tensor,
        pack: Pack,
        receive: Callable[[Parts], None],
    ) -> _Transfer:
        works: list[dist.Work | None] = []
        arriving: list[tuple[Bucket, torch.Tensor]] = []
        for rank, part in enumerate(parts):
            if not part.spans:
                continue
            row = room[rank, : part.nbytes]
            values = row.view(part.dtype)
            arriving.append((part, values))
            if rank == self._server:
                pack(part, values)
            else:
                works.append(dist.irecv(row, group=self._group, group_src=rank))
        return works, partial(receive, arriving)


def _nothing() -> None:
    pass


def _pipeline(transfers: Iterator[_Transfer]) -> None:
    """Ends each transfer in turn, and has at most _IN_FLIGHT started: those use buffers in turn."""
    flying: deque[_Transfer] = deque()

    def land() -> None:
        works, end = flying.popleft()
        for work in works:
            assert work is not None
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
