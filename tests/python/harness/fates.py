"""Ranks that a test starts, stops and kills one by one.

Each rank is a process, forked from the pools' warm process, with a pipe to the test. The result or
the error of its function comes back as a `Said`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from harness.pool import processes

LIMIT = 60.0  # seconds within which a rank must send its next message


@dataclass(frozen=True)
class Said:
    """A rank's result, or the class and text of the error that ended the rank."""

    value: Any
    error: str
    text: str
    at: float  # time.monotonic(), which all processes share


class Ranks:
    """`size` ranks that run function(pipe, rank, *arguments), with a layout as in harness.nodes.

    A context manager: its end kills all ranks that still run.
    """

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        layout: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            own = dict(environment or {})
            if layout:
                own["HBMCOMM_NODE_ID"] = layout[rank]
            ours, theirs = processes.Pipe()
            process: BaseProcess = processes.Process(
                target=_live, args=(theirs, rank, own, function, arguments)
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal. Returns the time.monotonic() at which it was sent."""
        os.kill(self.processes[rank].pid or 0, number)
        return time.monotonic()

    def tell(self, *ranks: int) -> None:
        """Send each of these ranks the message that it waits for, so that it continues."""
        for rank in ranks:
            self._pipes[rank].send("continue")

    def hear(self, *ranks: int, limit: float = LIMIT) -> list[Any]:
        """Return the next message of each of these ranks. A rank's last message is a Said."""
        deadline = time.monotonic() + limit
        said: dict[int, Any] = {}
        for rank in ranks:
            pipe = self._pipes[rank]
            ready = wait([pipe], max(0.0, deadline - time.monotonic()))
            assert ready, f"rank {rank} said nothing in {limit} s; the others: {said}"
            try:
                said[rank] = pipe.recv()
            except EOFError:
                self.processes[rank].join(LIMIT)
                code = self.processes[rank].exitcode
                raise AssertionError(f"rank {rank} ended with {code}; others: {said}") from None
        return [said[rank] for rank in ranks]


def _live(
    pipe: Connection,
    rank: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        value = function(pipe, rank, *arguments)
    except Exception as error:
        pipe.send(Said(None, type(error).__name__, str(error), time.monotonic()))
    else:
        pipe.send(Said(value, "", "", time.monotonic()))
