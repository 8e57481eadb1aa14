"""The server and the workers of one contender, each in its own process."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from papers.async_sgd.gradients import multiple_of_all
from papers.async_sgd.workload import Model
from torch_hbmcomm.bench.peer import Peer

_LEAD = 0.05  # seconds from the command to the first worker's start


class Participants:
    """A server and its workers.

    server, worker: further arguments of the server's and the workers' prepare().
    """

    def __init__(
        self,
        members: Sequence[Peer],
        server: Mapping[str, Any] | None = None,
        worker: Mapping[str, Any] | None = None,
    ) -> None:
        self._server, *self._workers = members
        self._server_options = dict(server or {})
        self._worker_options = dict(worker or {})

    @contextmanager
    def at_work(self, model: Model, count: int) -> Iterator["Turn"]:
        """Allocate the model's memory, and yield a turn of the first `count` workers.

        Server and workers free the memory at the end of the `with` block.
        """
        size = model.bytes
        answer = self._server.ask("prepare", size=size, workers=count, **self._server_options)
        workers = self._workers[:count]
        options = self._worker_options | answer
        for number, worker in enumerate(workers):
            worker.tell("prepare", size=size, weight=number + 1, **options)
        for worker in workers:
            worker.answer()
        yield Turn(self._server, workers, model)
        for worker in workers:
            worker.ask("release")
        self._server.ask("release")


class Turn:
    def __init__(self, server: Peer, workers: Sequence[Peer], model: Model) -> None:
        self._server = server
        self._workers = workers
        self._model = model
        self._pushes = 0

    def first(self) -> float:
        """Make one exchange with each worker, which touches all memory. Check the weights' range.

        Returns the seconds of the slowest worker.
        """
        times = self._run("sequential", 0.0, 0.0, 1)
        for number, worker in enumerate(self._workers):
            worker.tell("check", least=number + 1, most=self._total())
        for worker in self._workers:
            worker.answer()
        return max(one for (one,) in times)

    def run(self, scenario: str, iterations: int) -> list[float]:
        """Return the seconds of each iteration, as the mean over all workers.

        The workers' starts are spread over the time of one computation, as they are in workers that
        never wait for one another.
        """
        compute = self._model.compute
        times = self._run(scenario, compute, compute / len(self._workers), iterations)
        return [statistics.fmean(iteration) for iteration in zip(*times, strict=True)]

    def check(self) -> None:
        """Check that the server added every gradient exactly once."""
        self._server.ask("check", factor=self._total())

    def _total(self) -> int:
        return self._pushes * multiple_of_all(len(self._workers))

    def _run(
        self, scenario: str, compute: float, apart: float, iterations: int
    ) -> list[list[float]]:
        """Return, for each worker, the seconds of each iteration.

        apart: seconds from the start of one worker to the start of the next.
        """
        self._server.tell("serve", exchanges=len(self._workers) * iterations)
        begin = time.monotonic() + _LEAD
        for number, worker in enumerate(self._workers):
            worker.tell(
                "run",
                scenario=scenario,
                compute=compute,
                begin=begin + number * apart,
                iterations=iterations,
            )
        times = [worker.answer() for worker in self._workers]
        self._server.answer()
        for member in (self._server, *self._workers):
            member.ask("rest")
        self._pushes += iterations
        return times
