"""The memory boxes of a process group, as Options(parameter_server=...) requests.

With "auto", rank 0 starts a process that serves a box until the last rank has left or died. Only
the ranks of the group know the box's token. Otherwise every rank connects to boxes that run
already.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_hbmcomm import machine
from torch_hbmcomm.box_process import BoxProcess
from torch_hbmcomm.native import load
from torch_hbmcomm.smb import Box, BoxError, BoxUnreachable, connect
from torch_hbmcomm.smb.values import bytes_of, seal_option

_C = load()

_AUTO = "auto"
_CLOSE_TIMEOUT = 5.0  # seconds for operations in flight when the group ends
_LEASE = 30.0  # seconds after which the box ends the session of a silent client
_RECONNECT = 60.0  # seconds without a connection after which operations raise BoxUnreachable
_SILENCE = 5.0  # seconds that rank 0 waits for other ranks to leave the box before it warns


@dataclass(frozen=True)
class _Invitation:
    """The token and the addresses of the group's box, and its process as text.

    An address in `far` may lead a rank to another machine, because different networks may use the
    same address. The rank then tries the next address.
    """

    token: str
    near: list[str]  # for ranks that share rank 0's loopback
    far: list[str]
    process: str


class GroupBoxes:
    """This rank's clients of the group's boxes. With "auto", rank 0's object has also started the
    box's process."""

    def __init__(self, timeout: timedelta) -> None:
        self.boxes: list[Box] = []
        self.closed = False
        self._process: BoxProcess | None = None
        self._timeout = timeout.total_seconds()

    def serve(self, policy: Any, everywhere: bool) -> _Invitation:
        """Start the box's process. Other machines can reach the box only if `everywhere`."""
        token = secrets.token_hex(32)
        self._process = BoxProcess(
            listen=":0" if everywhere else "127.0.0.1:0",
            memory=_memory(),
            policy=policy,
            token=token,
            seal=seal_option(None),
            lease=_LEASE,
        )
        port = self._process.ready(self._timeout)[0].rpartition(":")[2]
        hosts = [*_other_addresses(), socket.gethostname()] if everywhere else []
        return _Invitation(
            token,
            [f"smb://127.0.0.1:{port}"],
            [f"smb://{host}:{port}" for host in hosts],
            f"process {self._process.pid} on {socket.gethostname()}",
        )

    def accept(self, invitation: _Invitation, near: bool) -> None:
        """Connect to the group's box. Raises BoxUnreachable with the failure at each address.

        near: True: this rank shares rank 0's loopback
        """
        failures = []
        for url in invitation.near if near else invitation.far:
            try:
                box = connect(
                    url, invitation.token, reconnect_timeout=_RECONNECT, timeout=self._timeout
                )
            except BoxError as error:
                failures.append(str(error))
                continue
            box.process = invitation.process
            self.boxes.append(box)
            return
        raise BoxUnreachable("the box of rank 0 is out of reach: " + "; ".join(failures))

    def connect(self, wanted: str) -> None:
        """Connect to boxes that run already, at the addresses in `wanted`."""
        for url in _addresses(wanted):
            try:
                self.boxes.append(connect(url, timeout=self._timeout))
            except ValueError as error:
                raise ValueError(
                    f'parameter_server="{wanted}" (the option, or HBMCOMM_PARAMETER_SERVER): '
                    f"{error}"
                ) from error

    def close(self, patient: bool) -> None:
        """Close the clients; the group calls it once, when it has ended.

        patient: True: wait for operations in flight, and on rank 0 until the other ranks have left
            the box
        """
        self.closed = True
        with ExitStack() as steps:  # calls the last callback first
            if self._process is not None:
                steps.callback(self._process.close)
                if patient and self._process.pid:
                    steps.callback(self._wait_for_end, self._process)
                steps.callback(self._process.leave)
            for box in self.boxes:
                steps.callback(box.close, _CLOSE_TIMEOUT if patient else 0.0)

    def _wait_for_end(self, process: BoxProcess) -> None:
        """Wait until every other rank has left the box or died, but at most for the group's
        timeout. Without the wait, the end of rank 0 might end its container or its job, and the box
        with it, while other ranks use the box."""
        silence = min(_SILENCE, self._timeout)
        if process.wait(silence):
            return
        left = self._timeout - silence
        if left > 0:
            _C.warn(
                f"destroy_process_group waits for the ranks that use the memory box of the group "
                f"({process.clients} now), for {left:.0f} s at most"
            )
            if process.wait(left):
                return
        _C.warn(
            f"the memory box of the group serves {process.clients} ranks, which have not called "
            f"destroy_process_group within {self._timeout:.0f} s, the group's timeout: the box "
            "goes on in its own process until they leave"
        )


def provide(backend: Any, timeout: timedelta) -> None:
    """Give a new group the boxes that its options ask for; the group closes them when it ends.

    REQUIRES: the group's options ask for boxes.

    Every rank of the group calls it. If one rank fails, that rank raises its own exception, and
    every other rank raises DistBackendError with that exception's text. Each rank shuts the group
    down before it raises.
    """
    wanted = backend.options.parameter_server
    boxes = GroupBoxes(timeout)
    backend.attach(boxes)
    try:
        invitation = _agree(backend, boxes, wanted)
        failures = backend.gather_texts(
            "memory boxes reached", lambda: _join(backend, boxes, wanted, invitation)
        )
        if failures[backend.rank()]:
            raise BoxUnreachable(failures[backend.rank()])
        for rank, failure in enumerate(failures):
            if failure:
                raise dist.DistBackendError(f"rank {rank}: BoxUnreachable: {failure}")
    except BaseException:
        backend.shutdown()
        raise


def _agree(backend: Any, boxes: GroupBoxes, wanted: str) -> _Invitation | None:
    """Exchange the options of the ranks. Returns rank 0's invitation to the group's box, or None
    if the group uses boxes that run already."""

    def offer() -> str:
        invitation = None
        if wanted == _AUTO and backend.rank() == 0:
            several = len(set(backend.networks())) > 1
            invitation = asdict(boxes.serve(backend.options.memory, several))
        return json.dumps([wanted, invitation])

    offers = [json.loads(text) for text in backend.gather_texts("parameter_server", offer)]
    first, invitation = offers[0]
    for rank, (other, _) in enumerate(offers):
        if _count(other) != _count(first):
            raise ValueError(
                f'parameter_server is "{first}" on rank 0 and "{other}" on rank {rank}; it must be '
                '"auto" on every rank, or name the same boxes in the same order'
            )
    return None if invitation is None else _Invitation(**invitation)


def _join(backend: Any, boxes: GroupBoxes, wanted: str, invitation: _Invitation | None) -> str:
    """Connect to the boxes. Returns why the group's box is out of reach, or "".

    It raises nothing in that case: the box ends soon after rank 0 has died without other clients.
    Then the exchange of the texts raises, and names the death.
    """
    if invitation is None:
        boxes.connect(wanted)
        return ""
    networks = backend.networks()
    try:
        boxes.accept(invitation, near=networks[backend.rank()] == networks[0])
    except BoxUnreachable as error:
        return str(error)
    return ""


def _count(wanted: str) -> int:
    """Return the number of boxes in `wanted` that run already."""
    return 0 if wanted == _AUTO else len(_addresses(wanted))


def _addresses(wanted: str) -> list[str]:
    """Split addresses, as in "smb://a:1,b:2" or "smb://a:1,smb://b:2"."""
    found = []
    for part in re.split(r",(?=smb(?:\+unix)?://)", wanted):
        if part.startswith("smb://"):
            found += [f"smb://{box}" for box in part.removeprefix("smb://").split(",")]
        else:
            found.append(part)
    return found


def _other_addresses() -> list[str]:
    """Return the addresses at which other machines may reach this one, as in URLs."""
    found = (each for each in load().machine_addresses() if not each.startswith("127."))
    return [f"[{each}]" if ":" in each else each for each in found]


def _memory() -> int:
    """Return the size in bytes of the box that "auto" starts. The box takes memory from the machine
    only as clients use it."""
    text = os.environ.get("HBMCOMM_BOX_MEMORY", "")
    if not text:
        return machine.memory() // 2
    try:
        return bytes_of(text)
    except ValueError as error:
        raise ValueError(f"HBMCOMM_BOX_MEMORY={text}: {error}") from error
