"""MPI_Send and MPI_Recv by ranks that sleep until their turn.

A worker asks the server for a turn. Server and worker poll for each other's messages, and sleep
between the polls. Only calls that transfer gradients or weights wait in MPI's busy loop.
"""

import time

from mpi4py import MPI

from papers.async_sgd.mpi_rank import SERVER, MpiServer, MpiWorker, world
from torch_hbmcomm.bench.peer import obey

_ASK, _TURN = 1, 2  # tags
_PAUSE_SECONDS = 50e-6


class SleepingServer(MpiServer):
    def next_worker(self) -> int:
        worker = _word_of(MPI.ANY_SOURCE, _ASK)
        world.Send(bytearray(1), worker, _TURN)
        return worker


class SleepingWorker(MpiWorker):
    def exchange(self) -> None:
        world.Send(bytearray(1), SERVER, _ASK)
        _word_of(SERVER, _TURN)
        super().exchange()


def _word_of(rank: int, tag: int) -> int:
    """Wait for a message without occupying a processor. Return its sender."""
    status = MPI.Status()
    while not world.Iprobe(rank, tag, status):
        time.sleep(_PAUSE_SECONDS)
    sender = int(status.Get_source())
    world.Recv(bytearray(1), sender, tag)
    return sender


if __name__ == "__main__":
    rank = world.Get_rank()
    obey(SleepingServer() if rank == SERVER else SleepingWorker(), rank)
