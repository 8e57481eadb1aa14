"""A box that serves over RDMA, and workers.

The box and each worker are processes, forked from a process that has not touched the device.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

from torch_hbmcomm import smb

TOKEN = "of this test"

_HOST = os.environ["HBM_BOX_HOST"]


def run(count: int, work: Callable[[int, str], None]) -> None:
    """Run work(number, url of the box) in each worker. Raises AssertionError if a worker fails."""
    context = multiprocessing.get_context("fork")
    ready, tell = context.Pipe(duplex=False)
    stop = context.Event()

    def serve() -> None:
        with smb.Server(f"{_HOST}:0", "256MiB", token=TOKEN, verbs="on") as server:
            tell.send(server.url)
            stop.wait()

    box = context.Process(target=serve)
    box.start()
    url = ready.recv()
    workers = [context.Process(target=work, args=(number, url)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stop.set()
    box.join()
    assert [worker.exitcode for worker in workers] == [0] * count
