"""Turns of one contender that trains with a parameter server."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from papers.layer_drop.cluster import Cluster, together
from torch_hbmcomm.bench.box import ROLE
from torch_hbmcomm.bench.peer import Peer, peer
from torch_hbmcomm.sizes import MIB

_WARM = 1  # uncounted step, which sends all layers

Times = Sequence[tuple[float, float]]
"""The times of steps: seconds, and the seconds in which the thread ran on a core."""


@dataclass(frozen=True)
class Turn:
    """The outcome of a turn.

    iterations: milliseconds of each iteration, mean over the workers.
    worker, server: milliseconds of compute in an iteration.
    up, down: megabytes in an iteration, to the server and from it.
    """

    iterations: list[float]
    worker: float
    server: float
    up: float
    down: float

    @property
    def iteration(self) -> float:
        return statistics.fmean(self.iterations)


def synchronous(hosts: Cluster, terms: Mapping[str, Any] | None, steps: int) -> Turn:
    """Train with a SyncParameterServer. terms: arguments of LayerDrop; None: no drop."""
    server, *workers = hosts.ranks
    hosts.all("prepare", terms=terms)
    server.tell("serve")
    times, crossed = _run(hosts, workers, steps)
    together(workers, "close")
    updates = server.answer()[_WARM : _WARM + steps]
    return _turn(times, updates, crossed)


def boxed(
    hosts: Cluster, terms: Mapping[str, Any] | None, transfer: str | None, steps: int
) -> Turn:
    """Train with a memory box. The box is no rank, so the turn has no times of the server."""
    node, workers = hosts.nodes[0], hosts.ranks[1:]
    token = secrets.token_hex(16)
    size, *_ = together(workers[:1], "size")
    with peer(ROLE, node.launcher, ["box"]) as box:
        url = box.ask(
            "open",
            listen=f"{node.address}:0",
            memory=(2 + 2 * len(workers)) * size + 64 * MIB,
            token=token,
            threads=0,
            store=None,
        )
        together(
            workers,
            "attach",
            url=url,
            token=token,
            workers=len(workers),
            transfer=transfer,
            terms=terms,
        )
        times, crossed = _run(hosts, workers, steps)
        together(workers, "close")
    return _turn(times, [], crossed)


def _run(hosts: Cluster, workers: Sequence[Peer], steps: int) -> tuple[list[Times], list[float]]:
    """Return the workers' times, and the megabytes over the link each way in a step."""
    together(workers, "run", steps=_WARM)
    before = hosts.received()
    times = together(workers, "run", steps=steps)
    ways = zip(before, hosts.received(), strict=True)
    return times, [(end - start) / steps / 1e6 for start, end in ways]


def _turn(workers: Sequence[Times], updates: Times, crossed: Sequence[float]) -> Turn:
    steps = [[1e3 * seconds for seconds, _ in step] for step in zip(*workers, strict=True)]
    compute = [1e3 * compute for times in workers for _, compute in times]
    up, down = crossed or (0.0, 0.0)
    return Turn(
        iterations=[statistics.fmean(step) for step in steps],
        worker=statistics.fmean(compute),
        server=statistics.fmean(1e3 * compute for _, compute in updates) if updates else 0.0,
        up=up,
        down=down,
    )
