"""MPI_Send and MPI_Recv, as in the paper: rank 0 is the server, all other ranks are workers."""

import threading

import numpy as np
from mpi4py import MPI

from benchmarks.mpi_segments import unlink_segments
from papers.async_sgd.gradients import Array, check_multiple
from papers.async_sgd.worker import Worker
from torch_hbmcomm.bench.peer import obey

SERVER = 0
DATA = 0  # the tag of gradients and weights
_PROBE_SECONDS = 1e-3
world = MPI.COMM_WORLD
unlink_segments(world)


class _Afterwards:
    """Calls MPI periodically from go_on() to rest(), in a rank that has ended its exchanges.

    The calls are needed because MPI may transfer a sent message only while the sender is in a call
    of MPI.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread()

    def go_on(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._probe, daemon=True)
        self._thread.start()

    def rest(self) -> None:
        self._over.set()
        self._thread.join()

    def _probe(self) -> None:
        while not self._over.wait(_PROBE_SECONDS):
            world.Iprobe()


class MpiServer(_Afterwards):
    _weights: Array
    _received: Array

    def prepare(self, size: int, workers: int) -> dict[str, str]:
        self._weights = np.full(size // 4, 0, np.float32)
        self._received = np.full(size // 4, 0, np.float32)
        return {}

    def serve(self, exchanges: int) -> None:
        status = MPI.Status()
        for _ in range(exchanges):
            world.Recv(self._received, self.next_worker(), DATA, status)
            np.add(self._weights, self._received, out=self._weights)
            world.Send(self._weights, status.Get_source(), DATA)
        self.go_on()

    def next_worker(self) -> int:
        """Return the worker whose gradients to receive next: the first that sends."""
        return int(MPI.ANY_SOURCE)

    def check(self, factor: int) -> None:
        check_multiple(self._weights, factor)

    def release(self) -> None:
        del self._weights, self._received


class MpiWorker(_Afterwards, Worker):
    def prepare(self, size: int, weight: int) -> None:
        self._allocate(size // 4, weight)

    def run(self, scenario: str, compute: float, begin: float, iterations: int) -> list[float]:
        times = super().run(scenario, compute, begin, iterations)
        self.go_on()
        return times

    def exchange(self) -> None:
        world.Send(self.gradients, SERVER, DATA)
        world.Recv(self.weights, SERVER, DATA)


if __name__ == "__main__":
    rank = world.Get_rank()
    obey(MpiServer() if rank == SERVER else MpiWorker(), rank)
