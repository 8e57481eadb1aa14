"""Plain sockets between two processes: the bound of tcp."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch_hbmcomm.bench.box.interleave import Timed
from torch_hbmcomm.bench.peer import Peer, peer

SOCKETS = "sockets"
POLLED = "sockets, polled"


class Bare:
    """Two ends. Each connect() replaces the connections before."""

    def __init__(self, server: Peer, client: Peer, host: str):
        self._server = server
        self._client = client
        self._host = host

    def connect(self, lanes: int, size: int, threads: bool = True) -> None:
        ends = {"host": self._host, "lanes": lanes, "size": size, "threads": threads}
        port = self._server.ask("listen", **ends)
        self._client.ask("connect", port=port, **ends)

    def timed(self, action: str) -> Timed:
        return lambda calls: float(self._client.ask("run", action=action, calls=calls))

    def times(self, calls: int) -> list[float]:
        found: list[float] = self._client.ask("times", calls=calls)
        return found


@contextmanager
def bare(
    host: str = "127.0.0.1", server: Sequence[str] = (), client: Sequence[str] = ()
) -> Iterator[Bare]:
    """server, client: the launchers of the ends."""
    with ExitStack() as stack:
        yield Bare(
            stack.enter_context(peer("box.lanes_peer", server)),
            stack.enter_context(peer("box.lanes_peer", client)),
            host,
        )
