"""Ports to listen at, and network namespaces, for tests that run beside one another."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from pathlib import Path

import pytest

_FIRST = 20000
_reservations: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    """A port to listen at, given to no other test of this machine while this process lives.

    It lies below the range that the kernel gives to outgoing connections, so that none takes it.
    """
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for port in random.sample(range(_FIRST, max(int(outgoing[0]), _FIRST + 2000)), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        if _reserve(port):
            return port
    raise RuntimeError("no free port found")


def _reserve(port: int) -> bool:
    """Whether no other process has it; by a name that the kernel frees when this process ends."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0hbmcomm-test-port-{port}")
    except OSError:
        name.close()
        return False
    _reservations.append(name)
    return True


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
