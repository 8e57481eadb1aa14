"""PyTorch's RPC over TensorPipe: rank 0 is the server, all other ranks are workers.

One call sends the gradients and returns the weights.
"""

import os
import threading

import torch
from torch.distributed import rpc

from papers.async_sgd.gradients import check_multiple
from papers.async_sgd.worker import Worker
from torch_hbmcomm.bench.peer import obey

_SERVER = 0
_FOR_EVER = 0.0
_kept = torch.empty(0)
_adding = threading.Lock()  # RPC calls _add() on several threads


def _add(gradients: torch.Tensor) -> torch.Tensor:
    with _adding:
        return _kept.add_(gradients)


class _Member:
    rank: int

    def join(self, store_file: str, world: int, over_link: bool) -> None:
        """Join the job. store_file: path of a new file, equal on all ranks."""
        torch.set_num_threads(1)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{store_file}",
            rpc_timeout=_FOR_EVER,
            # TensorPipe's default copies directly between processes, without the link.
            _transports=["uv"] if over_link else None,
            _channels=["basic"] if over_link else None,
        )
        rpc.init_rpc(str(self.rank), rank=self.rank, world_size=world, rpc_backend_options=options)


class RpcServer(_Member):
    rank = _SERVER

    def prepare(self, size: int, workers: int) -> dict[str, str]:
        global _kept
        _kept = torch.zeros(size // 4)
        return {}

    def serve(self, exchanges: int) -> None:
        """Do nothing: RPC's threads serve."""

    def rest(self) -> None:
        """Do nothing: RPC's threads run until the end."""

    def check(self, factor: int) -> None:
        check_multiple(_kept.numpy(), factor)

    def release(self) -> None:
        global _kept
        _kept = torch.empty(0)


class RpcWorker(_Member, Worker):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def prepare(self, size: int, weight: int) -> None:
        self._allocate(size // 4, weight)
        self._sent = torch.from_numpy(self.gradients)

    def exchange(self) -> None:
        self.weights = rpc.rpc_sync(str(_SERVER), _add, (self._sent,)).numpy()

    def release(self) -> None:
        del self._sent
        super().release()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(RpcServer() if rank == _SERVER else RpcWorker(rank), rank)
    os._exit(0)  # RPC would wait for ranks that have ended
