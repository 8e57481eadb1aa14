"""A box with the weights.

All servers: prepare() makes room for the weights, zeros, and returns what the workers' prepare() is
told besides; serve() answers so many exchanges; rest()
comes when all workers have ended theirs; check() compares the weights; release() gives all
memory back.
"""

import secrets

import numpy as np

from torch_hbmcomm import smb
from torch_hbmcomm.bench.async_sgd.gradients import check_multiple
from torch_hbmcomm.bench.peer import obey
from torch_hbmcomm.bench.sizes import MIB


class BoxServer:
    def prepare(self, size: int, workers: int, host: str, threads: int) -> dict[str, str | int]:
        """threads: that accumulate."""
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
        """The box does so by itself."""

    def rest(self) -> None:
        """Nor is there anything to end."""

    def check(self, factor: int) -> None:
        check_multiple(np.frombuffer(self._weights.view(), np.float32), factor)

    def release(self) -> None:
        self._box.close()
        self._server.close()


if __name__ == "__main__":
    obey(BoxServer())
