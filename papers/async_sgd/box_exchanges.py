"""Ways to exchange gradients for weights on a box."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from papers.async_sgd.gradients import Array
from papers.async_sgd.workload import Exchange
from torch_hbmcomm.sizes import MIB
from torch_hbmcomm.smb import Future, Segment

_PIECE_ZERO_COPY = 16 * MIB  # a read on shm of so much stores past the caches anywhere
_PIECE_TCP = MIB
_AHEAD = 1  # pieces that are being added while one is copied
_WRITES = 2  # at a time: more share the lanes, and all end late
"""The sizes and counts above were measured: see papers/README.md."""


def plain(shared: Segment, slot: Segment, gradients: Array, weights: Array) -> Exchange:
    """Make the paper's exchange, each step of which begins when the one before has ended."""

    def exchange() -> None:
        slot.write(source=gradients)
        shared.accumulate(slot, "float32")
        shared.read(into=weights)

    return exchange


def zero_copy(shared: Segment, slot: Segment, gradients: Array, weights: Array) -> Exchange:
    """Make an exchange of gradients that lie in the slot: the box adds a piece while the worker
    copies the sum of the one before. REQUIRES: the transport shm."""
    local = weights.view(np.uint8)

    def exchange() -> None:
        added: deque[tuple[int, int, Future]] = deque()
        for start, size in _pieces(shared.size, _PIECE_ZERO_COPY):
            added.append((start, size, shared.accumulate_async(slot, "float32", 1.0, start, size)))
            if len(added) > _AHEAD:
                fetch(*added.popleft())
        while added:
            fetch(*added.popleft())

    def fetch(start: int, size: int, added: Future) -> None:
        added.result()
        shared.read(start, size, into=local[start : start + size])

    return exchange


def pipelined(shared: Segment, slot: Segment, gradients: Array, weights: Array) -> Exchange:
    """Make an exchange that has pieces on their way to the box, being added, and on their way back
    at the same time. The box keeps the order: what touches the same bytes waits."""
    sent = gradients.view(np.uint8)
    fetched = weights.view(np.uint8)

    def exchange() -> None:
        writes: deque[Future] = deque()
        others: list[Future] = []
        for start, size in _pieces(shared.size, _PIECE_TCP):
            piece = slice(start, start + size)
            if len(writes) == _WRITES:
                writes.popleft().result()
            writes.append(slot.write_async(start, size, source=sent[piece]))
            others.append(shared.accumulate_async(slot, "float32", 1.0, start, size))
            others.append(shared.read_async(start, size, into=fetched[piece]))
        for future in (*writes, *others):
            future.result()

    return exchange


def _pieces(size: int, piece: int) -> Iterator[tuple[int, int]]:
    """Yield the start of each piece, and its bytes."""
    for start in range(0, size, piece):
        yield start, min(piece, size - start)


EXCHANGES = {"plain": plain, "zero-copy": zero_copy, "pipelined": pipelined}
