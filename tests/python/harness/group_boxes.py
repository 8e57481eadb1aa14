"""Groups with a memory box, formed by the ranks of a bare pool."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import torch_hbmcomm as hbmcomm
from harness.context import Context
from torch_hbmcomm import smb

TIMEOUT = 120.0  # seconds, of the groups; an error that a rank publishes arrives much sooner
SOON = 60.0


def form(context: Context, parameter_server: str | None, turn: int = 0) -> None:
    dist.init_process_group(
        "hbm",
        store=FileStore(str(context.folder / f"store{context.seed}-{turn}"), context.size),
        rank=context.rank,
        world_size=context.size,
        timeout=timedelta(seconds=TIMEOUT),
        pg_options=hbmcomm.Options(parameter_server=parameter_server),
    )


def assert_left(server: smb.Server) -> None:
    """Assert that all clients have left the box, and that none waits for the end of its lease."""
    deadline = time.monotonic() + 20  # the lease has 30 s
    while server.stats()["clients"]:
        assert time.monotonic() < deadline, server.stats()["client_table"]
        time.sleep(0.01)


def count_together(context: Context, box: smb.Box, group: dist.ProcessGroup | None = None) -> None:
    """Add to one cell on every rank, and check that all see the sum."""
    cell = box.alloc(8, key="together", temporary=True)
    cell.fetch_add(0, dist.get_rank(group) + 1)
    dist.barrier(group)
    ranks = dist.get_world_size(group)
    assert cell.fetch_add(0, 0) == ranks * (ranks + 1) // 2
    dist.barrier(group)
    cell.free()


def box_servers(sockets: Path) -> list[int]:
    """Return the processes that serve boxes with a socket in the directory `sockets`."""
    here = f"HBMCOMM_SOCKET_DIR={sockets}".encode()
    return [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdecimal()
        and b"box_server.py" in _content(process / "cmdline")
        and here in _content(process / "environ").split(b"\0")
    ]


def await_no_box(sockets: Path) -> None:
    """Wait until no process serves a box with a socket in the directory, and it has no socket."""
    deadline = time.monotonic() + SOON
    while left := [*box_servers(sockets), *os.listdir(sockets)]:
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.01)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""
