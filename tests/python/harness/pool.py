"""A pool of rank processes, kept across tests because a rank is slow to start.

The ranks are forked from one warm process (multiprocessing's forkserver) that has imported torch
and started no thread, so a pool costs a fraction of a second. After any failure the ranks are in
an unknown state: the pool kills them (by process id) and the next call starts new ones.

Used from one thread.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness import seeds, worker

# The forkserver: it starts processes that have imported torch already.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "torch.distributed.tensor", "pytest"]
)

# Seconds to wait for quick events, on a machine that has other work.
START_SECONDS = 120.0
LIMIT_SECONDS = 120.0
GRACE_SECONDS = 30.0  # for the other ranks' answers, once one rank has failed
EXIT_SECONDS = 60.0
STACK_SECONDS = 10.0  # for a hung rank to write its stack
LOG_TAIL = 6000  # characters

# Kinds of failure besides the names of exception classes.
HUNG = "hung"
DIED = "died"


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time.

    `kinds` maps the ranks concerned to the name of the exception's class, DIED or HUNG.
    """

    def __init__(self, message: str, kinds: dict[int, str]) -> None:
        super().__init__(message)
        self.kinds = kinds


class Pool:
    """`size` ranks with their groups formed. The ranks of a `bare` pool have no groups at first.

    `timeout` is the timeout of the group under test; a call's own limit is an argument of run().
    `environment` is set in the ranks before they form a group. On the `device` "late", the ranks
    have the test accelerator.
    """

    def __init__(
        self,
        size: int,
        *,
        bare: bool = False,
        timeout: float = 60,
        environment: dict[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.size = size
        self._device = device
        self._timeout = None if bare else timedelta(seconds=timeout)
        self._environment = environment or {}
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; starts the ranks if there are none."""
        self._start()
        return [process.pid or 0 for process in self._processes]

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        limit: float = LIMIT_SECONDS,
        seed: int | None = None,
    ) -> list[Any]:
        """Calls function(Context, *arguments) in every rank; returns the results by rank.

        `seed` is the seed of the contexts, by default a new seed.

        Raises RankFailure when a rank raises, dies, or has not answered within `limit` seconds.
        """
        __tracebackhide__ = True
        self._start()
        if seed is None:
            seed = seeds.fresh()
        request = pickle.dumps((function, arguments, seed))
        for pipe in self._pipes:
            pipe.send_bytes(request)
        return self._collect(limit, f"{function.__name__} with seed {seed}")

    def close(self) -> list[int | None]:
        """Lets the ranks leave in the ordinary way and returns their exit codes by rank.

        Raises RankFailure, with stacks, when a rank has not left within EXIT_SECONDS.
        """
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        if None in codes:
            hung = [rank for rank, code in enumerate(codes) if code is None]
            troubles = dict.fromkeys(hung, "did not leave in time")
            raise self._failure("closing the pool", troubles, dict.fromkeys(hung, HUNG))
        self.kill()
        return codes

    def kill(self) -> None:
        """End the ranks immediately and forget them; the next run() starts new ones."""
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        if self._processes:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="hbmcomm-test-"))
        for rank in range(self.size):
            ours, theirs = processes.Pipe()
            process = processes.Process(
                target=_enter,
                args=(
                    theirs,
                    self._folder,
                    rank,
                    self.size,
                    self._timeout,
                    self._environment,
                    self._device,
                ),
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(START_SECONDS, "starting the pool")

    def _collect(self, limit: float, what: str) -> list[Any]:
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        troubles: dict[int, str] = {}
        kinds: dict[int, str] = {}
        deadline = time.monotonic() + limit
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank, pipe in list(waiting.items()):
                if pipe not in ready:
                    continue
                del waiting[rank]
                try:
                    answer = pipe.recv()
                except EOFError:
                    self._processes[rank].join(EXIT_SECONDS)
                    kinds[rank] = DIED
                    troubles[rank] = f"died with exit code {self._processes[rank].exitcode}"
                else:
                    if isinstance(answer, worker.Ok):
                        results[rank] = answer.result
                        continue
                    kinds[rank], troubles[rank] = answer.kind, answer.trace
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in waiting:
            kinds[rank] = HUNG
            troubles[rank] = "did not answer in time"
        if troubles:
            raise self._failure(what, troubles, kinds)
        return [results[rank] for rank in range(self.size)]

    def _failure(self, what: str, troubles: dict[int, str], kinds: dict[int, str]) -> RankFailure:
        """Kill the ranks, and return an error with their troubles, output and stacks."""
        hung = [rank for rank, kind in kinds.items() if kind == HUNG]
        before = {rank: self._stacks(rank) for rank in hung}
        for rank in hung:
            pid = self._processes[rank].pid
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS  # a stopped rank writes no stack
        while hung and time.monotonic() < deadline:
            time.sleep(0.05)
            hung = [rank for rank in hung if self._stacks(rank) == before[rank]]
        alike: dict[str, list[int]] = {}
        for rank, trouble in sorted(troubles.items()):
            alike.setdefault(trouble.rstrip(), []).append(rank)
        parts = [f"{what}: {len(troubles)} of {self.size} ranks failed"]
        for trouble, ranks in alike.items():
            parts.append(f"--- ranks {ranks}: {trouble}")
        outputs = {rank: self._output(rank) for rank in sorted(troubles)}
        parts += [f"--- output of rank {rank}:\n{text}" for rank, text in outputs.items() if text]
        self.kill()
        return RankFailure("\n".join(parts), kinds)

    def _stacks(self, rank: int) -> int:
        """Return the number of stacks that the rank has written to its log."""
        assert self._folder is not None
        log = worker.log_path(self._folder, rank).read_bytes()
        return log.count(b"most recent call first")

    def _output(self, rank: int) -> str:
        assert self._folder is not None
        return worker.log_path(self._folder, rank).read_text(errors="replace")[-LOG_TAIL:]


def _enter(
    pipe: Connection,
    folder: Path,
    rank: int,
    size: int,
    timeout: timedelta | None,
    environment: dict[str, str],
    device: str,
) -> None:
    os.environ.update(environment)
    worker.main(pipe, folder, rank, size, timeout, device)
