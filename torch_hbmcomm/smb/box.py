"""The connection to a box."""

from __future__ import annotations

from typing import Any, Literal

from torch_hbmcomm import _smb
from torch_hbmcomm.smb import closing
from torch_hbmcomm.smb.batch import Batch
from torch_hbmcomm.smb.segment import Segment
from torch_hbmcomm.smb.token import find
from torch_hbmcomm.smb.values import bytes_of, halves, readable

Transport = Literal["auto", "shm", "tcp", "verbs"]
Mode = Literal["auto", "create", "attach"]


def connect(
    url: str,
    token: str | None = None,
    transport: Transport = "auto",
    lanes: int = 4,
    read_only: bool = False,
    connect_timeout: float = 5.0,
    reconnect_timeout: float = 60.0,
    timeout: float | None = None,
) -> Box:
    """Connects to the box at ``smb://host:port`` or ``smb+unix:///path``.

    ``token`` None is HBMCOMM_TOKEN, the file that HBMCOMM_TOKEN_FILE names, or
    ~/.config/hbmcomm/token; "" is none. ``transport`` "auto" picks shm, verbs or tcp by what works;
    any other works or is an error. A connection that is lost is made again, for
    ``reconnect_timeout`` seconds. ``timeout`` is each operation's, in seconds; None: none but that.

    Raises BoxUnreachable, AccessDenied, or ValueError for a bad argument.
    """
    for name, seconds in (
        ("connect_timeout", connect_timeout),
        ("reconnect_timeout", reconnect_timeout),
        ("timeout", timeout),
    ):
        if seconds is not None and seconds < 0:
            raise ValueError(f"{name} is not negative: {seconds}")
    if timeout == 0:
        raise ValueError("timeout is a positive number of seconds, or None for none")
    return Box(
        _smb.Client(
            url,
            find(token).text,
            transport,
            lanes,
            read_only,
            connect_timeout,
            reconnect_timeout,
            timeout,
        ),
        url,
    )


class Box(closing.Closing):
    """A connection to a memory box, for any number of threads; ``connect`` makes it."""

    def __init__(self, native: _smb.Client, url: str) -> None:
        self._native = native
        self.url = url
        closing.at_exit(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.transport
        return f"<Box {self.url}, {state}>"

    @property
    def transport(self) -> str:
        """ "shm", "tcp" or "verbs"."""
        return self._native.transport

    @property
    def why_transport(self) -> str:
        """Why this one, and why not those before it."""
        return self._native.why_transport

    @property
    def closed(self) -> bool:
        return self._native.closed

    def alloc(
        self,
        size: int | str | None,
        key: int | str | None = None,
        mode: Mode = "auto",
        temporary: bool = False,
        read_only: bool = False,
    ) -> Segment:
        """Makes a segment, or attaches to the one that has the key.

        ``mode``: "create" makes it or raises KeyInUse, "attach" attaches or raises NoSuchKey,
        "auto" does what is possible. Attaching to a segment of another size is a ValueError; a size
        of None, with "attach", takes whatever it has. Without a key the box chooses one that nobody
        can guess. A temporary segment is deleted when its last attachment ends.
        """
        if size is None and mode != "attach":
            raise ValueError('a size of None goes with mode="attach" alone')
        count = 0 if size is None else bytes_of(size)
        return Segment(
            self._native, self._native.alloc(count, halves(key), mode, temporary, read_only)
        )

    def batch(self) -> Batch:
        """Operations that are sent together at the end of a ``with`` block, and waited for."""
        return Batch(self._native.batch())

    def ping(self) -> None:
        """Asks the box for a sign of life."""
        self._native.ping()

    def stats(self) -> dict[str, Any]:
        """What the box has done since its start: totals, and a table each of clients and segments.

        Reads and writes on shm and verbs do not pass the box, and are not among them.
        """
        return readable(self._native.stats())

    def close(self, patience: float = 5.0) -> None:
        """Waits up to ``patience`` seconds for what is unfinished, and ends all attachments.
        Operations raise BoxError afterwards. Does nothing the second time."""
        self._native.close(patience)
