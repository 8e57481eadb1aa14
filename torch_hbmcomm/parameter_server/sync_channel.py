"""Transfers of tensors between the server and the other ranks of a SyncParameterServer.

Tensors are cut into buckets, runs of elements of one dtype that are sent as one message. So the
bytes in flight stay bounded. Buckets are sent by the group's gather and broadcast, or point to
point if ranks send different tensors. While one bucket is in flight, the previous one is unpacked
or averaged.

"Flat" tensors have one dimension.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist

from torch_hbmcomm import memory
from torch_hbmcomm.groups import is_hbm
from torch_hbmcomm.parameter_server.packing import Span, pack_spans, packed_ranges, parts_of

_IN_FLIGHT = 2  # buckets
BUCKET_BYTES = (25 << 20) // _IN_FLIGHT
_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Bucket:
    """Spans of tensors of one dtype, one after another in the message."""

    dtype: torch.dtype
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        return sum(span.length for span in self.spans) * self.dtype.itemsize

    def only(self, chosen: Sequence[bool]) -> Bucket:
        """Leave out the spans of tensors that are not chosen. chosen: by the tensor's index."""
        return Bucket(self.dtype, tuple(span for span in self.spans if chosen[span.tensor]))

    def pack(self, wire: torch.Tensor, flats: Sequence[torch.Tensor | None]) -> None:
        """Copy the spans of `flats` into `wire`. None counts as zeros."""
        for span, at in packed_ranges(self.spans):
            source = flats[span.tensor]
            if source is None:
                wire[at].zero_()
            else:
                wire[at].copy_(source[span.start : span.stop])

    def unpack(self, wire: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
        """Copy `wire` into the spans of `flats`."""
        for target, at in parts_of(self.spans, flats):
            target.copy_(wire[at])


def cut(tensors: Iterable[torch.Tensor], most: int) -> Iterator[Bucket]:
    """Cut all elements of `tensors` into buckets of at most `most` bytes, dtype after dtype.

    Tensors of the same sizes and dtypes give the same buckets on every rank.
    """
    by_dtype: dict[torch.dtype, list[tuple[int, int]]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append((index, tensor.numel()))
    for dtype, sizes in by_dtype.items():
        for spans in pack_spans(sizes, most // dtype.itemsize):
            yield Bucket(dtype, spans)


Parts = Sequence[tuple[Bucket, torch.Tensor]]  # of one bucket: the spans and elements of each rank
Receive = Callable[[Bucket, list[torch.Tensor]], None]
Pack = Callable[[Bucket, torch.Tensor], None]
_Works = Sequence[dist.Work | None]  # no work is None, because this rank is in the group
_Transfer = tuple[_Works, Callable[[], object]]  # works, and a function to call once they are done


class SyncChannel:
    """Moves tensors bucket by bucket, through buffers of its own.

    The buffers take 25 MiB, and on the server 25 MiB more for each rank of the group; less for a
    smaller model. With an hbm group they are in the segment of HBMCOMM_MEMORY's policy. If that is
    the group's policy, messages within a node are not staged.

    Every method is a collective. Used from one thread.
    """

    def __init__(self, group: dist.ProcessGroup, server: int, total_bytes: int) -> None:
        """Make the buffers. total_bytes: the most bytes of tensors that one call sends"""
        self._group = group
        self._server = server
        size = min(BUCKET_BYTES, total_bytes)
        self._bytes = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._send_buffers = [_buffer(group, (self._bytes,)) for _ in range(_IN_FLIGHT)]
        rows = (group.size(), self._bytes)
        at_server = group.rank() == server
        self._receive_buffers = (
            [_buffer(group, rows) for _ in range(_IN_FLIGHT)] if at_server else []
        )

    def broadcast(self, flats: Sequence[torch.Tensor], source: int) -> int:
        """Copy the `flats` of the rank `source` into every other rank's `flats`. Returns their size
        in bytes."""
        sends = self._group.rank() == source

        def start() -> Iterator[_Transfer]:
            for bucket, outgoing in zip(
                cut(flats, self._bytes), cycle(self._send_buffers), strict=False
            ):
                wire = outgoing[: bucket.nbytes]
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
        """Send every rank's `flats` to the server, which calls receive(bucket, rows) for each
        bucket. `rows` has the elements of every rank; receive() may overwrite them.

        None in `flats` counts as zeros. `like` has tensors of the same sizes and dtypes. Returns
        the bytes that each rank sends.
        """

        def start() -> Iterator[_Transfer]:
            incoming_buffers: list[torch.Tensor | None] = [*self._receive_buffers] or [None]
            for bucket, outgoing, incoming in zip(
                cut(like, self._bytes),
                cycle(self._send_buffers),
                cycle(incoming_buffers),
                strict=False,
            ):
                wire = outgoing[: bucket.nbytes]
                bucket.pack(wire.view(bucket.dtype), flats)
                rows = None if incoming is None else list(incoming[:, : bucket.nbytes])
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
        """Send tensor i of rank r to the server if brings[r][i] is true. Send no other tensors.

        pack(part, wire) puts this rank's part of a bucket into `wire`; it is called for the buckets
        in order. The server calls receive(parts) for each bucket, with the parts of all ranks that
        have one, in the order of the ranks; receive() may overwrite the parts. Returns the bytes of
        this rank's tensors that are sent.
        """
        rank = self._group.rank()
        incoming_buffers: list[torch.Tensor | None] = [*self._receive_buffers] or [None]

        def start() -> Iterator[_Transfer]:
            for bucket, outgoing, incoming in zip(
                cut(like, self._bytes),
                cycle(self._send_buffers),
                cycle(incoming_buffers),
                strict=False,
            ):
                parts = [bucket.only(chosen) for chosen in brings]
                if incoming is None:
                    yield self._send(parts[rank], outgoing, pack), _nothing
                else:
                    yield self._receive(parts, incoming, pack, receive)

        _pipeline(start())
        own = zip(like, brings[rank], strict=True)
        return _total([tensor for tensor, brought in own if brought])

    def _send(self, part: Bucket, outgoing: torch.Tensor, pack: Pack) -> _Works:
        if not part.spans:
            return []
        wire = outgoing[: part.nbytes]
        pack(part, wire.view(part.dtype))
        return [dist.isend(wire, group=self._group, group_dst=self._server)]

    def _receive(
        self,
        parts: Sequence[Bucket],
        incoming: torch.Tensor,
        pack: Pack,
        receive: Callable[[Parts], None],
    ) -> _Transfer:
        works: list[dist.Work | None] = []
        arriving: list[tuple[Bucket, torch.Tensor]] = []
        for rank, part in enumerate(parts):
            if not part.spans:
                continue
            row = incoming[rank, : part.nbytes]
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
    """Start the transfers, and end them in order, with at most _IN_FLIGHT of them in flight."""
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
    if is_hbm(group):
        return memory.empty(shape, torch.uint8)
    return torch.empty(shape, dtype=torch.uint8)


def _total(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
