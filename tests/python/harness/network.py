"""Ports to listen at, and network namespaces, for tests that run in parallel."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 1 << 14, 1 << 19, 2
_FIRST = 20000
_reservations: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    """Return a port to listen at that no other test of this machine gets while this process lives.

    The port is below the range of outgoing connections, so no connection takes it.
    """
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    draw = random.SystemRandom()  # not seeded: runs with the same seed may be parallel
    for port in draw.sample(range(_FIRST, max(int(outgoing[0]), _FIRST + 2000)), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        if _reserve(port):
            return port
    raise RuntimeError("no free port found")


def _reserve(port: int) -> bool:
    """Bind the abstract socket name that stands for the port. Returns False if it is taken.

    The kernel frees the name when this process ends.
    """
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0hbmcomm-test-port-{port}")
    except OSError:
        name.close()
        return False
    _reservations.append(name)
    return True


def own_connections() -> list[tuple[int, int, bool]]:
    """Return the local port, the remote port, and whether it listens, of each TCP socket that this
    process has."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread may close it meanwhile
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    rows = [
        line.split()
        for table in Path("/proc/self/net").glob("tcp*")  # no tcp6 where the kernel has no IPv6
        for line in table.read_text().splitlines()[1:]
    ]
    return [
        (int(row[1].rpartition(":")[2], 16), int(row[2].rpartition(":")[2], 16), row[3] == "0A")
        for row in rows
        if f"socket:[{row[9]}]" in own
    ]


def await_no_listener(limit: float = 60.0) -> list[int]:
    """Wait until this process listens at no TCP port. Returns the ports that are left.

    While a group is being formed, the failure monitor of a rank may listen for other ranks. Its
    thread stops listening soon after the group is formed. No schedule bounds this time.
    """
    deadline = time.monotonic() + limit
    while True:
        left = [port for port, _, listens in own_connections() if listens]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def skip_unless_namespaces_work() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    name = f"hbmtest{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("network namespaces need the program ip (package iproute2)")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", name], check=True)


def enter_namespace(network: str) -> None:
    """Enter the network namespace, and see its devices in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: Any, *arguments: Any) -> None:
        if function(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")

    with open(f"/run/netns/{network}") as namespace:
        call(libc.setns, namespace.fileno(), _CLONE_NEWNET)
    call(libc.unshare, _CLONE_NEWNS)
    call(libc.mount, None, b"/", None, _MS_SLAVE | _MS_REC, None)
    call(libc.umount2, b"/sys", _MNT_DETACH)
    call(libc.mount, b"sysfs", b"/sys", b"sysfs", 0, None)
