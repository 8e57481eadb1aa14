"""The client of benchmarks.box.distant, and the peer of its plain connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from torch_hbmcomm import smb
from torch_hbmcomm.bench.peer import obey

_HEADER = 9  # bytes: the operation, and the size in decimal digits
_MOST = 1 << 20  # bytes of a receive


class Client:
    """One end of the plain connection. The client's end also has a connection to the box."""

    def __init__(self) -> None:
        self._opened = ExitStack()

    def listen(self, address: str, port: int) -> None:
        self._listener = socket.create_server((address, port))

    def serve(self) -> None:
        """Accept a connection, and answer until it ends."""
        line, _ = self._listener.accept()
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        while header := line.recv(_HEADER, socket.MSG_WAITALL):
            size = int(header[1:])
            if header[:1] == b"w":
                _take(line, size)
                line.sendall(b"!")
            else:
                line.sendall(bytes(size))

    def connect(self, address: str, port: int) -> None:
        self._line = socket.create_connection((address, port))
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def hang_up(self) -> None:
        self._line.close()
        self._opened.close()

    def open(self, url: str, token: str, lanes: int) -> None:
        """Connect to the box, in place of the last connection to it."""
        self._opened.close()
        self._box = self._opened.enter_context(smb.connect(url, token, "tcp", lanes=lanes))

    def measure(self, size: int, rounds: int, box: bool) -> dict[str, list[float]]:
        """Return the seconds of `rounds` writes and reads. A first one of each does not count."""
        data, back = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        operations: dict[str, Callable[[], object]]
        if box:
            segment = self._box.alloc(size, temporary=True)
            operations = {
                "write": lambda: segment.write(source=data),
                "read": lambda: segment.read(into=back),
            }
        else:
            operations = {
                "write": lambda: self._exchange(b"w", size, bytes(size), 1),
                "read": lambda: self._exchange(b"r", size, b"", size),
            }
        seconds: dict[str, list[float]] = {name: [] for name in operations}
        for turn in range(1 + rounds):
            for name, run in operations.items():
                begin = time.perf_counter()
                run()
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
        if box and not (back == data).all():
            raise RuntimeError("the box returned other bytes than it was given")
        return seconds

    def _exchange(self, operation: bytes, size: int, data: bytes, answer: int) -> None:
        self._line.sendall(operation + b"%08d" % size + data)
        _take(self._line, answer)


def _take(line: socket.socket, size: int) -> None:
    while size:
        got = len(line.recv(min(size, _MOST)))
        if not got:
            raise ConnectionError("the other end has closed the plain connection")
        size -= got


if __name__ == "__main__":
    obey(Client())
