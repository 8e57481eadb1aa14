"""Who takes part."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch_hbmcomm.bench.async_sgd.crew import Crew
from torch_hbmcomm.bench.async_sgd.plan import Plan
from torch_hbmcomm.bench.namespaces import Node


@dataclass(frozen=True)
class Place:
    """Where a server and its workers run: on this machine, or at the two ends of a cable."""

    server: Node | None = None
    workers: Node | None = None

    @property
    def host(self) -> str:
        """At which the server listens."""
        return "127.0.0.1" if self.server is None else self.server.address

    def node(self, rank: int) -> Node | None:
        """Of the server, rank 0, or of a worker; none: this machine as it is."""
        return self.workers if rank else self.server


@dataclass(frozen=True)
class Contender:
    """
    transport: "shm", where memory is shared, or "tcp".
    parts: how many times the model's size it takes, by the number of workers.
    crew: starts a server and so many workers. Raises Unavailable, or PeerFailed.
    ours: when it fails, the run does.
    """

    name: str
    about: str
    transport: str
    parts: Callable[[int], int]
    crew: Callable[[Plan, int, Place], AbstractContextManager[Crew]]
    ours: bool = False
