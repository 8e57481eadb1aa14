"""Serves a memory box's statistics as Prometheus text, over HTTP."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from types import TracebackType
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from torch_hbmcomm.smb import Server

_LAST_PORT = 65535

_COUNTS = {
    "reads": "Reads that passed the box; on shm and verbs none do.",
    "read_bytes": "Bytes of these reads.",
    "writes": "Writes that passed the box.",
    "written_bytes": "Bytes of these writes.",
    "accumulates": "Accumulates.",
    "accumulated_bytes": "Bytes of their targets.",
    "fetch_adds": "fetch_add operations.",
}
_GAUGES = {
    "capacity_bytes": "Memory for segments.",
    "used_bytes": "Memory of segments.",
    "largest_free_bytes": "What one more segment could have.",
    "clients": "Sessions, with those whose lease runs.",
    "segments": "Segments.",
}


class Address(NamedTuple):
    """The address at which metrics are served."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``"127.0.0.1:9100"`` or ``"[::1]:9100"``. ``":9100"`` stands for every IPv4 address
        of this machine. Raises ValueError for anything else."""
        match = re.fullmatch(r"(.*):([0-9]+)", text)
        if match is None:
            raise ValueError(f"--metrics takes host:port, not {text!r}")
        if int(match[2]) > _LAST_PORT:
            raise ValueError(f"--metrics {text}: a port is a number of 0 to {_LAST_PORT}")
        return cls(match[1].strip("[]") or "0.0.0.0", int(match[2]))


class Metrics:
    """Serves http://host:port/metrics until its with block ends.

    Raises OSError when the address cannot be listened on.
    """

    def __init__(self, server: Server, address: Address) -> None:
        self._host = f"[{address.host}]" if ":" in address.host else address.host
        registry = CollectorRegistry()
        registry.register(_Box(server))
        try:
            self._http = _HttpServer(address)
        except OSError as error:
            raise OSError(
                f"--metrics {self._host}:{address.port} cannot be listened on: {error}"
            ) from error
        self._http.set_app(make_wsgi_app(registry))
        self._thread = Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._http.server_port}/metrics"

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _HttpServer(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread of its own.

    At most 16 connections are open, and each is closed after 10 to 11 s. If 16 are open, a new
    connection closes the oldest one, so silent clients do not block other clients.
    """

    daemon_threads = True
    block_on_close = False
    _MOST = 16
    _SECONDS = 10.0

    def __init__(self, address: Address) -> None:
        self._lock = Lock()
        self._open: dict[socket.socket, float] = {}  # times of arrival, ascending
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((address.host, address.port), _Quiet)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) == self._MOST:
                self._end(next(iter(self._open)))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close the connections that are too old, twice a second."""
        with self._lock:
            before = time.monotonic() - self._SECONDS
            for one in [one for one, since in self._open.items() if since < before]:
                self._end(one)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that broke."""

    def _end(self, connection: socket.socket) -> None:
        """Wake the connection's thread, which closes it."""
        del self._open[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log no requests."""


class _Box(Collector):
    def __init__(self, server: Server) -> None:
        self._server = server

    def describe(self) -> list[Metric]:
        return []  # without describe() the registry would call collect() to learn names

    def collect(self) -> Iterator[Metric]:
        stats = self._server.stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"hbmcomm_box_{name}", text, value=stats[name])
        yield GaugeMetricFamily(
            "hbmcomm_box_uptime_seconds", "Since the start.", value=stats["uptime_ms"] / 1000
        )
        yield GaugeMetricFamily(
            "hbmcomm_box_fragmentation",
            "Of the free addresses: 0 none, towards 1 in small blocks.",
            value=stats["pool"]["fragmentation"],
        )
        for name, text in _COUNTS.items():
            yield CounterMetricFamily(f"hbmcomm_box_{name}", text, value=stats[name])
        yield from _rows(
            "client", stats["client_table"], _client_labels, ("attachments", "idle_ms")
        )
        yield from _rows(
            "segment", stats["segment_table"], _segment_labels, ("attachments", "size")
        )


def _rows(
    what: str,
    rows: list[dict[str, Any]],
    labels: Callable[[dict[str, Any]], dict[str, str]],
    gauges: tuple[str, ...],
) -> Iterator[Metric]:
    """Yield a family for each column of a table, with the labels of each row."""
    labelled = [(labels(row), row) for row in rows]
    names = list(labelled[0][0]) if labelled else []
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for column in gauges:
        name = f"hbmcomm_box_{what}_{column}"
        families[column] = GaugeMetricFamily(name, f"{column} of each {what}.", labels=names)
    for column, text in _COUNTS.items():
        name = f"hbmcomm_box_{what}_{column}"
        families[column] = CounterMetricFamily(name, f"{text} By {what}.", labels=names)
    for values, row in labelled:
        for column, family in families.items():
            family.add_metric(list(values.values()), row[column])
    return iter(families.values())


def _client_labels(row: dict[str, Any]) -> dict[str, str]:
    return {
        "client": _fingerprint(row["session"]),
        "pid": str(row["pid"]),
        "transport": row["transport"],
        "host": row["host"],
    }


def _segment_labels(row: dict[str, Any]) -> dict[str, str]:
    return {"segment": _fingerprint(f"{row['key']:032x}")}


def _fingerprint(secret: str) -> str:
    """Return a hash that names a key or a session. Metrics have hashes, because with the key or the
    session's number a reader of the metrics could use the segment or the session."""
    return hashlib.blake2b(secret.encode(), digest_size=8).hexdigest()
