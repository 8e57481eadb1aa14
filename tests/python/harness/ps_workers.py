"""Workers of a parameter server as threads of one process, each with connections of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from harness import seeds
from harness.ps_task import Optimize, backward, network, weights
from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server import ParameterServer
from torch_hbmcomm.parameter_server.worker import AsyncWorker

TOKEN = "a token for tests"
WAIT_SECONDS = 60.0  # seconds for other workers

Result = TypeVar("Result")


@dataclass(frozen=True)
class Boxes:
    servers: Sequence[smb.Server]
    transport: Any

    @contextmanager
    def connected(self) -> Iterator[list[smb.Box]]:
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    smb.connect(
                        server.url,
                        TOKEN,
                        transport=self.transport,
                        connect_timeout=WAIT_SECONDS,
                    )
                )
                for server in self.servers
            ]

    def rows(self) -> list[dict[str, Any]]:
        """Return the statistics of each segment, of all boxes."""
        return [row for server in self.servers for row in server.stats()["segment_table"]]


@contextmanager
def serving(transport: str, count: int = 1, memory: str = "64MiB", **options: Any) -> Iterator[Any]:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(smb.Server(memory=memory, token=TOKEN, **options))
            for _ in range(count)
        ]
        yield Boxes(servers, transport)


def together(count: int, work: Callable[[int, threading.Barrier], Result]) -> list[Result]:
    """Call work(worker, barrier) in `count` parallel threads. Raises the error raised first."""
    barrier = threading.Barrier(count, timeout=WAIT_SECONDS)
    errors: list[BaseException] = []

    def guarded(worker: int) -> Result:
        try:
            return work(worker, barrier)
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(guarded, worker) for worker in range(count)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


@contextmanager
def parameter_server(
    boxes: Boxes, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Iterator[ParameterServer]:
    """Yield a parameter server with its own connections. Without `optimizer` it has plain SGD."""
    with (
        boxes.connected() as connections,
        ParameterServer(
            model,
            optimizer or torch.optim.SGD(model.parameters(), lr=1.0),
            box=connections,
            **{"timeout": WAIT_SECONDS, **options},
        ) as ps,
    ):
        yield ps


def trained(
    boxes: Boxes, workers: int, optimize: Optimize, steps: int, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """Return the weights on each worker after the last step."""

    def work(worker: int, barrier: threading.Barrier) -> dict[str, torch.Tensor]:
        model = network()
        delays = seeds.draws(worker)
        optimizer = optimize(model.parameters())
        with parameter_server(boxes, model, optimizer, workers=workers, **options) as ps:
            for step in range(steps):
                backward(model, step, worker, workers)
                time.sleep(delays.random() * 2e-3)
                ps.step()
            barrier.wait()
            ps.pull()
            return weights(model)

    return together(workers, work)


def settle(ps: ParameterServer) -> None:
    """Wait until the overlapping exchange is done. Users need no such call."""
    exchanging(ps).wait_for_exchange()


def exchanging(ps: ParameterServer) -> AsyncWorker:
    """Return the worker of a process, or of its node. REQUIRES: this rank leads its node."""
    if isinstance(ps._worker, AsyncWorker):
        return ps._worker
    assert ps._worker._worker is not None
    return ps._worker._worker
