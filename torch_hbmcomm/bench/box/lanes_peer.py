"""One end of plain sockets: who serves a buffer, or who copies from and to it."""

import socket
import threading

from torch_hbmcomm import _smb
from torch_hbmcomm.bench.box.memory import private
from torch_hbmcomm.bench.peer import obey


class Lanes:
    """threads: as many as there are lanes; otherwise one polls them all."""

    def listen(self, host: str, lanes: int, size: int, threads: bool) -> int:
        """The port; serves until the other end closes."""
        listener = socket.create_server((host, 0))
        buffer = private(size)

        def serve() -> None:
            with listener:
                sockets = [_ready(listener.accept()[0]) for _ in range(lanes)]
            _smb.BenchLanes(sockets, buffer, threads).serve()

        threading.Thread(target=serve, daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def connect(self, host: str, port: int, lanes: int, size: int, threads: bool) -> None:
        sockets = [_ready(socket.create_connection((host, port))) for _ in range(lanes)]
        self._lanes = _smb.BenchLanes(sockets, private(size), threads)

    def run(self, action: str, calls: int) -> float:
        return self._lanes.read(calls) if action == "read" else self._lanes.write(calls)

    def times(self, calls: int) -> list[float]:
        return self._lanes.read_times(calls)


def _ready(connection: socket.socket) -> int:
    """Its descriptor, for others to close."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    return connection.detach()


if __name__ == "__main__":
    obey(Lanes())
