"""A memory box that this process serves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from torch_hbmcomm import _smb
from torch_hbmcomm.smb.closeable import Closeable, close_at_exit
from torch_hbmcomm.smb.token import find_or_create
from torch_hbmcomm.smb.values import bytes_of, readable, seal_option
from torch_hbmcomm.variables import warn_of_wrong_ones


class Server(Closeable):
    """Serves a memory box from the end of the constructor until close().

    Args:
        listen: an address "host:port" for TCP and RDMA, or several; port 0: any free port; (): no
            address
        memory: the size of all segments together, in bytes or as text such as "16GiB"
        policy: the memory's policy: see torch_hbmcomm.memory
        store: a directory in which the segments survive the process, and with `sync` a crash of
            the machine; None: no store
        token: the secret that clients need; "" admits every client. None: HBMCOMM_TOKEN, the file
            HBMCOMM_TOKEN_FILE, or ~/.config/hbmcomm/token, which is created if missing.
        unix: the path of the Unix socket, which the transport shm needs; True: the box chooses a
            path; False: no Unix socket
        sync: True, with `store`: wait for the disk, so that keys, accumulates and fetch_adds
            survive a crash of the machine. Data that clients write may still be lost.
        lease: seconds after which the attachments of a silent client end
        most_clients: the largest number of clients. A client counts until it leaves or its lease
            ends, connected or not.
        smallest_block: the smallest block of the memory pool, in bytes or text; a power of two
        largest_block: the largest block of the memory pool, in bytes or text; a power of two. No
            segment is larger.
        handlers: the number of threads for requests; 0: the box chooses it
        accumulate_threads: the number of threads for sums; 0: the box chooses it
        receivers: the number of threads that receive; 0: the box chooses it
        verbs: "on": an error if RDMA does not work; "auto": RDMA if it works; "off": no RDMA
        verbs_host: the address of an RDMA device's network interface; "": the first device
        verbs_port: the port of the RDMA connection manager, not of TCP; 0: any
        seal: True: with a token, authenticate the data of TCP, and the control messages of RDMA.
            Must be equal for the box and its clients. None: HBMCOMM_BOX_SEAL, else True.

    Raises ValueError for an invalid argument, OSError if a token cannot be created, MemoryError or
    RuntimeError with the cause if the box cannot start.
    """

    def __init__(
        self,
        listen: str | Sequence[str] = "127.0.0.1:0",
        memory: int | str = "1GiB",
        policy: Literal["preferred", "bind", "interleave", "ddr"] = "preferred",
        store: str | os.PathLike[str] | None = None,
        token: str | None = None,
        *,
        unix: bool | str | os.PathLike[str] = True,
        sync: bool = False,
        lease: float = 30.0,
        most_clients: int = 4096,
        smallest_block: int | str = "4KiB",
        largest_block: int | str = "32GiB",
        handlers: int = 0,
        accumulate_threads: int = 0,
        receivers: int = 0,
        verbs: Literal["auto", "on", "off"] = "auto",
        verbs_host: str = "",
        verbs_port: int = 0,
        seal: bool | None = None,
    ) -> None:
        warn_of_wrong_ones()
        found = find_or_create(token)
        self.token = found.text
        """The token that clients need; "" without one."""
        self.token_source = found.source
        """The source of the token, as text."""
        self._native = _smb.Server(
            listen=[listen] if isinstance(listen, str) else list(listen),
            unix_socket=unix is not False,
            socket_path="" if isinstance(unix, bool) else os.fspath(unix),
            memory=bytes_of(memory),
            policy=policy,
            smallest_block=bytes_of(smallest_block),
            largest_block=bytes_of(largest_block),
            store="" if store is None else os.fspath(store),
            sync=sync,
            token=self.token,
            seal=seal_option(seal),
            lease=lease,
            most_clients=most_clients,
            handlers=handlers,
            accumulate_threads=accumulate_threads,
            receivers=receivers,
            verbs=verbs,
            verbs_host=verbs_host,
            verbs_port=verbs_port,
        )
        self._transports = ["shm"] * (unix is not False) + ["tcp"] * bool(listen)
        if verbs != "off" and listen and not _smb.why_no_verbs():
            self._transports.append("verbs")
        close_at_exit(self)

    @property
    def url(self) -> str:
        """The address that clients connect to."""
        return self._native.url

    @property
    def urls(self) -> list[str]:
        """All addresses, the Unix socket last."""
        return self._native.urls

    @property
    def transports(self) -> list[str]:
        """The transports that clients can use: some of "shm", "tcp" and "verbs"."""
        return self._transports

    @property
    def closed(self) -> bool:
        """True if the box is closed."""
        return self._native.closed

    def stats(self) -> dict[str, Any]:
        """Return the counts of Box.stats(), and the state of the memory pool (``pool``). A row of
        ``client_table`` also has the ``host`` of the client: its address as the box sees it,
        ``"local"`` for a Unix socket, or ``""`` if it is unknown."""
        return readable(self._native.stats())

    def drain(self, most: float = 5.0) -> None:
        """Refuse further clients and requests. Return when all received requests are answered, or
        after ``most`` seconds."""
        self._native.drain(most)

    def close(self) -> None:
        """End the box; without a store all segments are lost. Does nothing when called again."""
        self._native.close()
