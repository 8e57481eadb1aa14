"""Several clients at a time, each reading and writing in turn: the box's whole speed, and how
evenly the clients share it (Fig. 5 of the paper)."""

import time
from collections.abc import Sequence
from contextlib import ExitStack

from torch_hbmcomm.bench.box.boxes import box
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import Measurement
from torch_hbmcomm.bench.box.section import Findings, Goal, Section
from torch_hbmcomm.bench.peer import Peer, peer
from torch_hbmcomm.bench.sizes import MIB

_SEGMENT = 16 * MIB  # of each client: together, more than caches hold
_PIECE = MIB
_MOST_ROUNDS = 3
_CLIENTS_PER_WINDOW = 8  # more take longer: each needs its turns on few processors
_LEAD = 0.1  # seconds from telling them to the common start


def _measure(plan: Plan, findings: Findings) -> None:
    segment = max(_PIECE, min(_SEGMENT, plan.largest))
    transports = ("shm", "tcp")
    memory = 2 * len(transports) * max(plan.clients) * segment
    with ExitStack() as stack:
        ours = stack.enter_context(box(plan, memory=memory))
        crowd: list[Peer] = []
        for count in sorted(plan.clients):
            while len(crowd) < count:
                crowd.append(stack.enter_context(peer("box.client_peer")))
                for transport in transports:
                    ours.connect(crowd[-1], transport, segment)
            window = plan.window * max(1, count / _CLIENTS_PER_WINDOW)
            moved: dict[str, list[list[int]]] = {transport: [] for transport in transports}
            for _ in range(min(_MOST_ROUNDS, plan.rounds)):
                for transport in transports:
                    moved[transport].append(_together(crowd, transport, window))
            for transport, rounds in moved.items():
                findings.add([_measurement(transport, rounds, window)])


def _together(crowd: Sequence[Peer], transport: str, window: float) -> list[int]:
    """The bytes of each. Until all of them begin in time, there is another try with more of it."""
    lead = _LEAD
    while True:
        begin = time.monotonic() + lead
        for client in crowd:
            client.tell("mixed", transport=transport, begin=begin, seconds=window, piece=_PIECE)
        moved: list[int | None] = [client.answer() for client in crowd]
        in_time = [count for count in moved if count is not None]
        if len(in_time) == len(moved):
            return in_time
        lead *= 2


def _measurement(transport: str, rounds: Sequence[Sequence[int]], window: float) -> Measurement:
    """In a round that moved nothing, the piece took the whole window at the least."""
    each = [sum(moved) for moved in zip(*rounds, strict=True)]
    samples = [window * 1e6 / max(1, sum(moved) / _PIECE) for moved in rounds]
    return Measurement(
        "clients",
        "read and write",
        _PIECE,
        f"hbm {transport}",
        samples,
        clients=len(each),
        smallest_share=min(each) / max(1, sum(each) / len(each)),
    )


CLIENTS = Section(
    "clients",
    "processes that read and write in turn, each a segment of its own; GB/s of all together, and "
    "the smallest client's part of an equal share",
    _measure,
    [Goal("hbm shm", fair=0.5), Goal("hbm tcp", fair=0.5)],
)
