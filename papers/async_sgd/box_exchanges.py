"""Ways to exchange gradients for weights on a box."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from papers.async_sgd.gradients import Array
from papers.async_sgd.workload import Exchange
from torch_hbmcomm.sizes import MIB
from torch_hbmcomm.smb import Future, Segment

_CHUNK_ZERO_COPY = 16 * MIB  # a read of this size on shm uses non-temporal stores on any machine
_CHUNK_TCP = MIB
_AHEAD = 1  # chunks that the box adds while the worker copies one
_WRITES = 2  # in flight: more writes share the connections, and all end late
"""The sizes and counts above were measured: see papers/README.md."""


def plain(shared: Segment, buffer: Segment, gradients: Array, weights: Array) -> Exchange:
    """Make the paper's exchange: write, accumulate and read, one after the other."""

    def exchange() -> None:
        buffer.write(source=gradients)
        shared.accumulate(buffer, "float32")
        shared.read(into=weights)

    return exchange


def zero_copy(shared: Segment, buffer: Segment, gradients: Array, weights: Array) -> Exchange:
    """Make an exchange of gradients that were computed in `buffer`.

    The box adds the gradients of a chunk while the worker copies the weights of the chunk before.
    REQUIRES: the transport shm.
    """
    local = weights.view(np.uint8)

    def exchange() -> None:
        added: deque[tuple[int, int, Future]] = deque()
        for start, size in _chunks(shared.size, _CHUNK_ZERO_COPY):
            added.append(
                (start, size, shared.accumulate_async(buffer, "float32", 1.0, start, size))
            )
            if len(added) > _AHEAD:
                fetch(*added.popleft())
        while added:
            fetch(*added.popleft())

    def fetch(start: int, size: int, added: Future) -> None:
        added.result()
        shared.read(start, size, into=local[start : start + size])

    return exchange


def pipelined(shared: Segment, buffer: Segment, gradients: Array, weights: Array) -> Exchange:
    """Make an exchange that sends, adds and fetches several chunks at the same time.

    The client of the box keeps the order: an operation waits for earlier ones on the same bytes.
    """
    sent = gradients.view(np.uint8)
    fetched = weights.view(np.uint8)

    def exchange() -> None:
        writes: deque[Future] = deque()
        others: list[Future] = []
        for start, size in _chunks(shared.size, _CHUNK_TCP):
            chunk = slice(start, start + size)
            if len(writes) == _WRITES:
                writes.popleft().result()
            writes.append(buffer.write_async(start, size, source=sent[chunk]))
            others.append(shared.accumulate_async(buffer, "float32", 1.0, start, size))
            others.append(shared.read_async(start, size, into=fetched[chunk]))
        for future in (*writes, *others):
            future.result()

    return exchange


def _chunks(size: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the bytes of each chunk."""
    for start in range(0, size, chunk):
        yield start, min(chunk, size - start)


EXCHANGES = {"plain": plain, "zero-copy": zero_copy, "pipelined": pipelined}
