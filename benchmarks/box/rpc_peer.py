"""A worker (rank 0) and a server (rank 1), which stores a tensor for the worker.

They use PyTorch's RPC over TensorPipe.
"""

import os

import torch
from torch.distributed import rpc

from torch_hbmcomm.bench.peer import obey
from torch_hbmcomm.bench.rounds import timed

_NAMES = ("worker", "server")
_kept = torch.empty(0)


def _resize(size: int) -> None:
    global _kept
    _kept = torch.ones(size // 4)


def _write(data: torch.Tensor) -> None:
    _kept.copy_(data)


def _read() -> torch.Tensor:
    return _kept


def _add(data: torch.Tensor) -> None:
    _kept.add_(data)


class Rank:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def join(self, store_file: str, world: int) -> None:
        """Join the job. store_file: path of a file that does not exist yet; equal on both ranks."""
        torch.set_num_threads(1)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store_file}")
        rpc.init_rpc(
            _NAMES[self._rank], rank=self._rank, world_size=world, rpc_backend_options=options
        )

    def prepare(self, size: int) -> None:
        self._local = torch.ones(size // 4)
        rpc.rpc_sync("server", _resize, (size,))

    def run(self, operation: str, samples: int, calls: int) -> list[float]:
        """Return the microseconds of a call, for each sample, as rounds.Timed does."""

        def call() -> None:
            if operation == "read":
                self._local.copy_(rpc.rpc_sync("server", _read))
            else:
                change = _write if operation == "write" else _add
                rpc.rpc_sync("server", change, (self._local,))

        return list(timed(call)(samples, calls))


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Rank(rank), rank)
