"""Small operations, one at a time."""

import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from torch_hbmcomm.bench.box.bare import SOCKETS, bare
from torch_hbmcomm.bench.box.boxes import box
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import Measurement
from torch_hbmcomm.bench.box.section import Findings, Goal, Section
from torch_hbmcomm.bench.peer import Peer, peer
from torch_hbmcomm.bench.sizes import KIB

_SIZE = 4 * KIB
_CALLS = 500  # in a round

EachTimed = Callable[[int], list[float]]
"""The nanoseconds of each of so many calls."""


def _measure(plan: Plan, findings: Findings) -> None:
    with ExitStack() as stack:
        ours = stack.enter_context(box(plan))
        client = stack.enter_context(peer("box.client_peer"))
        sockets = stack.enter_context(bare())
        for transport in ("shm", "tcp"):
            ours.connect(client, transport, _SIZE)
        sockets.connect(1, _SIZE)
        for operation, size in (("read", _SIZE), ("write", _SIZE), ("fetch_add", 8)):
            contenders: dict[str, EachTimed] = {
                f"hbm {transport}": _each(client, transport, operation)
                for transport in ("shm", "tcp")
            }
            if operation == "read":
                contenders[SOCKETS] = sockets.times
            for who, (medians, p99) in _interleave(contenders, plan.rounds).items():
                findings.add([Measurement("latency", operation, size, who, medians, p99_us=p99)])


def _each(client: Peer, transport: str, action: str) -> EachTimed:
    def times(calls: int) -> list[float]:
        found: list[float] = client.ask("times", transport=transport, action=action, calls=calls)
        return found

    return times


def _interleave(
    contenders: Mapping[str, EachTimed], rounds: int
) -> dict[str, tuple[list[float], float]]:
    """For each, in microseconds: the median of every round, and the 99th percentile of all."""
    medians: dict[str, list[float]] = {who: [] for who in contenders}
    everything: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(rounds):
        for who, times in contenders.items():
            times(_CALLS // 10)
            found = [nanoseconds / 1e3 for nanoseconds in times(_CALLS)]
            medians[who].append(statistics.median(found))
            everything[who] += found
    return {
        who: (medians[who], statistics.quantiles(everything[who], n=100)[98]) for who in contenders
    }


LATENCY = Section(
    "latency",
    "one small operation after the other; over one plain socket, a request of 40 bytes and as many "
    "bytes back as the read has",
    _measure,
    [
        Goal("hbm shm", operation="read", microseconds=5),
        Goal("hbm tcp", [SOCKETS], operation="read", times=1.5),
    ],
    streams=0,
)
