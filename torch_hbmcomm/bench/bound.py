"""How long memory alone takes: no allreduce that reads and writes every buffer can be faster."""

import torch.distributed as dist

from torch_hbmcomm import native
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.collectives import Cell
from torch_hbmcomm.bench.contender import Contender, Loop
from torch_hbmcomm.bench.sizes import MIB


class Bound(Contender):
    """Each rank reads its share of as many buffers as there are ranks, and writes the sum to all
    of them, waiting for nobody. Whatever the type, bytes are added as float32."""

    name = "bound"
    about = "memory alone: every rank reduces its share, with no synchronisation"
    placed = True
    reference = True

    _LEAST_BYTES = MIB  # below, it would measure caches and instructions

    def why_unavailable(self) -> str | None:
        try:
            native.load()
        except ImportError as error:
            return str(error)
        return None

    def offers(self, cell: Cell) -> bool:
        return cell.collective == "allreduce" and cell.bytes >= self._LEAST_BYTES

    def open(self) -> None:
        self._ranks = dist.get_world_size()

    def prepare(self, cell: Cell, buffers: Buffers) -> Loop:
        loop, tensor = native.load().bench_bound, buffers.whole
        return lambda calls: loop(tensor.data_ptr(), cell.bytes, self._ranks, calls)
