"""Connections that break repeatedly, before or after the box has answered a request over them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from torch_hbmcomm import smb

MOST = 64 << 10  # bytes that pass from a client over a connection: enough to join and attach


class Relay:
    """Passes bytes between clients and a box. Ends a connection after MOST bytes of the client."""

    def __init__(self, box: str) -> None:
        host, _, port = box.removeprefix("smb://").rpartition(":")
        self.box = host, int(port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"smb://127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.connections += 1
                box = socket.create_connection(self.box)
                for ends, most in (((client, box), MOST), ((box, client), 1 << 30)):
                    threading.Thread(target=self.move, args=(*ends, most), daemon=True).start()

    def move(self, source: socket.socket, target: socket.socket, most: int) -> None:
        with suppress(OSError):
            while most > 0 and (data := source.recv(MOST)):
                target.sendall(data)
                most -= len(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(server: smb.Server) -> Iterator[Relay]:
    made = Relay(server.url)
    yield made
    made.listener.close()


def test_a_request_that_breaks_each_connection_is_given_up(
    server: smb.Server, relay: Relay, capfd: pytest.CaptureFixture[str]
) -> None:
    with smb.connect(
        relay.url, server.token, transport="tcp", lanes=1, reconnect_timeout=5, timeout=60
    ) as box:
        segment = box.alloc(1 << 20)
        with pytest.raises(smb.BoxUnreachable, match="connections since then broke before any"):
            segment.write(source=bytes(1 << 20))
    assert relay.connections < 20
    assert capfd.readouterr().err.count("lost the connection") == 1


def test_answers_end_an_outage(server: smb.Server, relay: Relay) -> None:
    with smb.connect(
        relay.url, server.token, transport="tcp", lanes=1, reconnect_timeout=30
    ) as box:
        segment = box.alloc(1 << 20)
        for _ in range(200):  # a connection breaks after one or two writes
            segment.write(source=bytes(MOST // 2))
    assert relay.connections > 50
