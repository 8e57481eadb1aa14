"""The bound that memory sets: no allreduce that reads and writes every buffer can be faster."""

import torch.distributed as dist

from benchmarks import programs
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.contenders import Contender
from torch_hbmcomm.bench.rounds import Timed
from torch_hbmcomm.sizes import MIB


class Bound(Contender):
    """The memory traffic of an allreduce, without synchronisation.

    Each rank works in its own memory, which has one part per rank. Part i stands for this rank's
    share of rank i's buffer. The rank reads all parts, and writes their sum to all parts. Bytes of
    any type are added as float32.
    """

    name = "bound"
    about = "memory alone: every rank reduces its share, with no synchronisation"
    reference = True

    _LEAST_BYTES = MIB  # smaller buffers would measure caches and instructions

    def why_unavailable(self) -> str | None:
        return programs.why_unavailable()

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return collective == "allreduce" and size >= self._LEAST_BYTES

    def open(self) -> None:
        self._program = programs.Program("bounds")

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        self._program.ask("bound", buffers.size, dist.get_world_size())
        return self._program.timed("run")
