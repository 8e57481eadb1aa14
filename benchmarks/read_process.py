"""Compares one copy by process_vm_readv with two copies through shared memory.

    python -m benchmarks.read_process

Within a node, a message from ordinary memory takes two copies: into the sender's segment and out of
it. The copies overlap if each rank has a processor. process_vm_readv needs one copy, by the
receiver. Three calls alternate for each size: process_vm_readv, one copy by the receiver, and two
copies one after the other, as on a single processor. The time of two overlapping copies is between
the times of the last two calls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from torch_hbmcomm.bench import report

KIB = 1 << 10
SIZES = [16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 16 * 1024 * KIB]

app = typer.Typer(add_completion=False)


class _IoVector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


class Memory:
    """Pages at an address: shared with forked children, or private."""

    def __init__(self, size: int, flags: int) -> None:
        self._pages = mmap.mmap(-1, size, flags=flags | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        ctypes.memset(self.address, 1, size)


def reader(process: int, source: int, target: int, size: int) -> Callable[[], None]:
    """Return a call that copies `size` bytes from `process` to this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    own, other = _IoVector(target, size), _IoVector(source, size)

    def read() -> None:
        got = libc.process_vm_readv(process, ctypes.byref(own), 1, ctypes.byref(other), 1, 0)
        if got != size:
            sys.exit(f"process_vm_readv: {os.strerror(ctypes.get_errno())}")

    return read


def copy_twice(source: int, shared: int, target: int, size: int) -> None:
    ctypes.memmove(shared, source, size)
    ctypes.memmove(target, shared, size)


def microseconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


@app.command()
def main(rounds: Annotated[int, typer.Option(help="samples of each median")] = 101) -> None:
    """Measure copies of some sizes."""
    largest = max(SIZES)
    source, target = (Memory(largest, mmap.MAP_PRIVATE) for _ in range(2))
    shared = Memory(largest, mmap.MAP_SHARED)
    gate, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        os.read(gate, 1)  # returns when the parent has ended or closed its end
        os._exit(0)
    table = Table(title="medians, minima in brackets")
    for name in ("size", "process_vm_readv", "one copy", "two copies"):
        table.add_column(name, justify="right")
    for size in SIZES:
        ways: list[Callable[[], object]] = [
            reader(child, source.address, target.address, size),
            partial(ctypes.memmove, target.address, shared.address, size),
            partial(copy_twice, source.address, shared.address, target.address, size),
        ]
        turns = [[microseconds(way) for way in ways] for _ in range(rounds)]
        columns = list(zip(*turns, strict=True))
        figures = [f"{statistics.median(one):.1f} µs ({min(one):.1f})" for one in columns]
        table.add_row(f"{size // KIB} KiB", *figures)
    os.close(held)
    os.waitpid(child, 0)
    report.show(table)


if __name__ == "__main__":
    app()
