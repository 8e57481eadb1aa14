"""A worker (rank 0) and a server (rank 1) over MPI. The server stores a buffer for the worker.

- "send", as in Ahn et al. (2018): the worker sends or receives. The server receives into the buffer
  (write), sends the buffer (read), or receives data and adds them to the buffer (add).
- "put": one-sided: the worker writes, reads or adds to the server's buffer through an MPI window.
"""

import numpy as np
from mpi4py import MPI

from benchmarks.mpi_segments import unlink_segments
from torch_hbmcomm.bench.peer import obey
from torch_hbmcomm.bench.rounds import timed

_WORKER, _SERVER = 0, 1


class Rank:
    """A rank. Both ranks get the same commands."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        unlink_segments(self._world)
        self.rank = self._world.Get_rank()
        self._window: MPI.Win | None = None

    def prepare(self, size: int) -> None:
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
        own = size if self.rank == _SERVER else 0
        self._window = MPI.Win.Allocate(own, 4, comm=self._world)
        unlink_segments(self._world)
        self._local = np.ones(size // 4, dtype=np.float32)
        self._kept = np.asarray(self._window.tomemory()).view(np.float32)
        self._kept[:] = 1
        self._window.Lock_all()

    def run(self, way: str, operation: str, samples: int, calls: int) -> list[float]:
        """Return the microseconds of a call, for each sample, as rounds.Timed does."""
        self._world.Barrier()
        found = list(timed(getattr(self, f"_{way}_{operation}"))(samples, calls))
        self._world.Barrier()
        return found

    def _send_write(self) -> None:
        if self.rank == _WORKER:
            self._world.Send(self._local, _SERVER)
        else:
            self._world.Recv(self._kept, _WORKER)

    def _send_read(self) -> None:
        if self.rank == _WORKER:
            self._world.Recv(self._local, _SERVER)
        else:
            self._world.Send(self._kept, _WORKER)

    def _send_add(self) -> None:
        if self.rank == _WORKER:
            self._world.Send(self._local, _SERVER)
        else:
            self._world.Recv(self._local, _WORKER)
            np.add(self._kept, self._local, out=self._kept)

    def _put_write(self) -> None:
        if self.rank == _WORKER:
            self._open.Put(self._local, _SERVER)
            self._open.Flush(_SERVER)

    def _put_read(self) -> None:
        if self.rank == _WORKER:
            self._open.Get(self._local, _SERVER)
            self._open.Flush(_SERVER)

    def _put_add(self) -> None:
        if self.rank == _WORKER:
            self._open.Accumulate(self._local, _SERVER, op=MPI.SUM)
            self._open.Flush(_SERVER)

    @property
    def _open(self) -> MPI.Win:
        assert self._window is not None, "prepare() comes first"
        return self._window


if __name__ == "__main__":
    actor = Rank()
    obey(actor, actor.rank)
