"""A server that is a box, and its workers. Each worker has a buffer for its gradients in the box.

All servers have these methods:

- prepare() allocates the weights, which are zeros, and returns arguments of the workers' prepare()
- serve() answers the given number of exchanges
- rest() ends the work that serve() left running; it is called when all workers have ended their
  exchanges
- check() compares the weights with the expected sum
- release() frees all memory
"""

import secrets
import sys

import numpy as np

from papers.async_sgd.box_exchanges import EXCHANGES
from papers.async_sgd.gradients import check_multiple
from papers.async_sgd.worker import Worker
from torch_hbmcomm import smb
from torch_hbmcomm.bench.peer import obey
from torch_hbmcomm.sizes import MIB
from torch_hbmcomm.smb.box import Transport


class BoxServer:
    def prepare(self, size: int, workers: int, host: str, threads: int) -> dict[str, str | int]:
        """Serve a box with memory for the weights and for each worker's buffer.

        threads: number of threads that accumulate on the box.
        """
        self._server = smb.Server(
            listen=f"{host}:0",
            memory=(1 + workers) * size + MIB,
            token=secrets.token_hex(16),
            accumulate_threads=threads,
            verbs="off",
        )
        self._box = smb.connect(self._server.urls[-1], self._server.token, "shm")
        self._weights = self._box.alloc(size, mode="create")
        return {
            "url": self._server.url,
            "token": self._server.token,
            "key": f"{self._weights.key:032x}",
        }

    def serve(self, exchanges: int) -> None:
        """Do nothing: the box serves by itself."""

    def rest(self) -> None:
        """Do nothing: the box has nothing to end."""

    def check(self, factor: int) -> None:
        check_multiple(np.frombuffer(self._weights.view(), np.float32), factor)

    def release(self) -> None:
        self._box.close()
        self._server.close()


class BoxWorker(Worker):
    def prepare(
        self,
        size: int,
        weight: int,
        way: str,
        transport: Transport,
        lanes: int,
        url: str,
        token: str,
        key: str,
    ) -> None:
        self._box = smb.connect(url, token, transport, lanes)
        shared = self._box.alloc(size, key=key, mode="attach")
        buffer = self._box.alloc(size, mode="create", temporary=True)
        self._allocate(size // 4, weight)
        if way == "zero-copy":
            view = np.frombuffer(buffer.view(), np.float32)
            view[:] = self.gradients
            self.gradients = view
        self._exchange = EXCHANGES[way](shared, buffer, self.gradients, self.weights)

    def exchange(self) -> None:
        self._exchange()

    def release(self) -> None:
        del self._exchange
        super().release()
        self._box.close()


if __name__ == "__main__":
    obey(BoxServer() if sys.argv[2:] == ["server"] else BoxWorker())
