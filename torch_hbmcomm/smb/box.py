"""Connections to a box: new ones (connect), and the boxes of a process group (of, all_of)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from torch_hbmcomm import _smb
from torch_hbmcomm.smb.batch import Batch
from torch_hbmcomm.smb.closeable import Closeable, close_at_exit
from torch_hbmcomm.smb.segment import Segment
from torch_hbmcomm.smb.token import find
from torch_hbmcomm.smb.values import bytes_of, halves, readable, seal_option
from torch_hbmcomm.variables import warn_of_wrong_ones

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    seal: bool | None = None,
) -> Box:
    """Connect to the box at ``smb://host:port`` or ``smb+unix:///path``.

    Args:
        url: the address of the box
        token: the secret that the box asks for; "" is no token. None: HBMCOMM_TOKEN, the file
            HBMCOMM_TOKEN_FILE, or ~/.config/hbmcomm/token; without any of them no token.
        transport: "auto" picks the first of shm, verbs and tcp that works. If another transport is
            named and does not work, connect() raises.
        lanes: the number of connections over tcp, or of queue pairs over verbs
        read_only: True: this client cannot write, and the box enforces it.
        connect_timeout: the most seconds of one attempt to connect
        reconnect_timeout: seconds without a connection after which operations raise BoxUnreachable
        timeout: the most seconds of each operation; None: no limit while the connection lives
        seal: True: with a token, authenticate the data of tcp, and the control messages of verbs.
            Must be equal for the box and its clients. None: HBMCOMM_BOX_SEAL, else True.

    Raises BoxUnreachable, AccessDenied, ValueError for a bad argument, or FileNotFoundError if
    HBMCOMM_TOKEN_FILE names no file.
    """
    warn_of_wrong_ones()
    for name, seconds in (
        ("connect_timeout", connect_timeout),
        ("reconnect_timeout", reconnect_timeout),
        ("timeout", timeout),
    ):
        if seconds is not None and seconds < 0:
            raise ValueError(f"{name} is not negative: {seconds}")
    if not 0 < lanes < 1 << 32:
        raise ValueError(f"lanes is a positive number of 32 bits, not {lanes}")
    if timeout == 0:
        raise ValueError("timeout is a positive number of seconds, or None for none")
    return Box(
        _smb.Client(
            url,
            find(token).text,
            transport,
            lanes,
            seal_option(seal),
            read_only,
            connect_timeout,
            reconnect_timeout,
            timeout,
        ),
        url,
    )


class Box(Closeable):
    """A connection to a memory box, for any number of threads; ``connect`` makes it."""

    def __init__(self, native: _smb.Client, url: str) -> None:
        self._native = native
        self.url = url
        self.process = ""
        """The process of a box that a process group has started, as text; "" for other boxes."""
        close_at_exit(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.transport
        return f"<Box {self.url}, {state}>"

    @property
    def transport(self) -> str:
        """The transport: "shm", "tcp" or "verbs"."""
        return self._native.transport

    @property
    def why_transport(self) -> str:
        """The reason for this transport, and the reasons against transports that were tried before
        it."""
        return self._native.why_transport

    @property
    def closed(self) -> bool:
        """True if the connection is closed."""
        return self._native.closed

    def alloc(
        self,
        size: int | str | None,
        key: int | str | None = None,
        mode: Mode = "auto",
        temporary: bool = False,
        read_only: bool = False,
    ) -> Segment:
        """Create a segment, or attach to the segment with the key.

        Args:
            size: bytes, or text such as "64KiB"; None, with "attach": any size. Attaching to a
                segment of another size raises ValueError.
            key: an integer or a name; None: a random key, which the box chooses
            mode: "create" creates the segment or raises KeyInUse. "attach" attaches or raises
                NoSuchKey. "auto" attaches if the key exists, and else creates the segment.
            temporary: True: the segment is deleted when its last attachment ends.
            read_only: True: the attachment may only read.
        """
        if size is None and mode != "attach":
            raise ValueError('a size of None goes with mode="attach" alone')
        count = 0 if size is None else bytes_of(size)
        wanted = None if key is None else halves(key)
        return Segment(self._native, self._native.alloc(count, wanted, mode, temporary, read_only))

    def exists(self, key: int | str) -> bool:
        """Return True if a segment has the key, without attaching to it."""
        return self._native.exists(halves(key))

    def batch(self) -> Batch:
        """Collect operations, which a ``with`` block sends together and awaits at its end."""
        return Batch(self._native.batch())

    def ping(self) -> None:
        """Send a request without effect, and wait for the reply."""
        self._native.ping()

    def stats(self) -> dict[str, Any]:
        """Return counts since the start of the box: totals, and tables of its clients and
        segments.

        Reads and writes over shm and verbs bypass the box, and are not counted.
        """
        return readable(self._native.stats())

    def close(self, patience: float = 5.0) -> None:
        """Wait up to ``patience`` seconds for unfinished operations, and end all attachments.
        Operations raise BoxError afterwards. Does nothing when called again."""
        self._native.close(patience)


def of(group: ProcessGroup | None = None) -> Box:
    """Return the group's first box, or its only one.

    Do not close the box: the group does.

    Args:
        group: a group that was formed with boxes; None: the default group

    Raises ValueError, as all_of does.
    """
    return all_of(group)[0]


def all_of(group: ProcessGroup | None = None) -> list[Box]:
    """Return the boxes that the group was formed with (torch_hbmcomm.group_boxes): the one box of
    "auto", or the boxes of the given addresses, in their order.

    Args:
        group: a group that was formed with boxes; None: the default group

    Raises ValueError for a group without boxes, of another backend, or that has ended.
    """
    resource = _backend(group).resource
    if resource is None:
        raise ValueError(
            "the group has no memory box: form it, by init_process_group, new_group or "
            'hbmcomm.split_group, with pg_options=hbmcomm.Options(parameter_server="auto"), or '
            'with the address of a box, "smb://host:port"; HBMCOMM_PARAMETER_SERVER sets the '
            "default"
        )
    if resource.closed:
        raise ValueError("the group has ended, and its memory boxes with it: form another one")
    return list(resource.boxes)


def _backend(group: ProcessGroup | None) -> Any:
    dist: Any = sys.modules.get("torch.distributed")  # without it there is no group
    chosen = dist.group.WORLD if group is None and dist is not None else group
    if chosen is None:
        raise ValueError("there is no default group: call init_process_group first")
    if not isinstance(chosen, dist.ProcessGroup):
        raise ValueError(f"{chosen!r} is no process group that this rank is in")
    from torch_hbmcomm.groups import hbm_backend

    return hbm_backend(chosen, "memory boxes")
