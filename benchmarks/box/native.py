"""Native programs with the loops: a client of the box, and plain sockets between processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.programs import Program, program
from torch_hbmcomm.bench.box import BoxProcess
from torch_hbmcomm.bench.rounds import Timed

SOCKETS = "sockets"
POLLED = "sockets, polled"


class NativeClient:
    """A native program that uses the box, so that no Python runs between two operations.

    The program has a client for each transport, and one local buffer. Its methods resemble
    ClientPeer's (torch_hbmcomm/bench/box_peer.py).
    """

    def __init__(self, running: Program) -> None:
        self._program = running

    def connect(self, box: BoxProcess, transport: str, size: int) -> None:
        self._program.ask("connect", box.url, box.token, transport, box.lanes, size)

    def disconnect(self) -> None:
        self._program.ask("disconnect")

    def check(self, transport: str) -> None:
        """Write to the segment, and read back. Raises PeerFailed if the bytes differ."""
        self._program.ask("check", transport)

    def check_sum(self, transport: str, dtype: str) -> None:
        """Accumulate ones, which stay in the source. Raises PeerFailed if the sum is wrong."""
        self._program.ask("check_sum", transport, dtype)

    def timed(self, transport: str, action: str) -> Timed:
        """Return the loop of an action.

        Actions are read, write, fetch_add, "accumulate TYPE" and "add TYPE". On shm there are also
        "memcpy read", "memcpy write", "copy_bytes read" and "copy_bytes write".
        """
        return self._program.timed("run", transport, action.replace(" ", ":"))


@contextmanager
def native_client(launcher: Sequence[str] = ()) -> Iterator[NativeClient]:
    with program("box_client", launcher=launcher) as running:
        yield NativeClient(running)


class Sockets:
    """Plain sockets between two processes. Each connect() replaces the earlier connections."""

    def __init__(self, server: Program, client: Program, host: str) -> None:
        self._server = server
        self._client = client
        self._host = host

    def connect(self, lanes: int, size: int, threads: bool = True) -> None:
        """Connect the ends by `lanes` connections.

        threads: True: each end has a thread per connection. False: one thread polls all
        connections.
        """
        options = (lanes, size, "threads" if threads else "poll")
        (port,) = self._server.ask("listen", self._host, *options)
        self._client.ask("connect", self._host, int(port), *options)

    def timed(self, action: str) -> Timed:
        return self._client.timed("run", action)


@contextmanager
def sockets(
    host: str = "127.0.0.1", server: Sequence[str] = (), client: Sequence[str] = ()
) -> Iterator[Sockets]:
    """Start both ends.

    server, client: words to put before the command of the server, and of the client.
    """
    with ExitStack() as stack:
        ends = [stack.enter_context(program("sockets", launcher=one)) for one in (server, client)]
        yield Sockets(ends[0], ends[1], host)
