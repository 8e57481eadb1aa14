"""A box in a process of its own, and clients of it."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch_hbmcomm.bench.box.interleave import Timed
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.peer import Peer, peer
from torch_hbmcomm.bench.sizes import MIB

_SEGMENTS = 6  # of the largest size: two clients' with their sources, and what is not yet released


@dataclass(frozen=True)
class Box:
    url: str
    token: str
    lanes: int

    def connect(self, client: Peer, transport: str, size: int) -> None:
        """The client's segment and local buffer have `size` bytes."""
        client.ask(
            "connect",
            url=self.url,
            token=self.token,
            transport=transport,
            lanes=self.lanes,
            size=size,
        )


@contextmanager
def box(
    plan: Plan,
    host: str = "127.0.0.1",
    launcher: Sequence[str] = (),
    store: Path | None = None,
    memory: int = 0,
) -> Iterator[Box]:
    """memory: bytes, if it is more than what the plan's largest size takes."""
    token = secrets.token_hex(16)
    with peer("box.box_peer", launcher) as process:
        url = process.ask(
            "open",
            listen=f"{host}:0",
            memory=max(memory, _SEGMENTS * plan.largest + 64 * MIB),
            token=token,
            threads=plan.threads,
            store=None if store is None else str(store),
        )
        yield Box(url, token, plan.lanes)


def timed(client: Peer, transport: str, action: str) -> Timed:
    return lambda calls: float(client.ask("run", transport=transport, action=action, calls=calls))
