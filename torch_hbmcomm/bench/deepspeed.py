"""DeepSpeed's allreduce through shared memory. benchmarks/README.md tells how to add it.

It is an operator that DeepSpeed compiles on first use. It serves all ranks of the machine as one
group, and leaves its segments in /dev/shm, from where they are removed here.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from torch_hbmcomm import native
from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.collectives import NATIVE, Cell
from torch_hbmcomm.bench.contender import Contender, Loop, repeated


class DeepSpeed(Contender):
    name = "deepspeed"
    about = "DeepSpeed's shared-memory operator"
    dtypes = ("float32", "float16", "bfloat16")

    def why_unavailable(self) -> str | None:
        if importlib.util.find_spec("deepspeed") is None:
            return "it is not installed; benchmarks/README.md tells how to add it"
        try:
            _load()
        except Exception as error:  # DeepSpeed and compilers have no common type
            return f"its operator does not load: {error}"
        return None

    def offers(self, cell: Cell) -> bool:
        return cell.collective in ("allreduce", NATIVE) and cell.dtype in self.dtypes

    def open(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        os.environ["LOCAL_SIZE"] = str(ranks)  # it falls back to doing nothing where they differ
        _load().initialize(ranks, rank)
        dist.barrier()  # every rank has opened every segment
        names = ("MASTER_ADDR", "MASTER_PORT")
        job = "_".join([str(os.getuid()), *(os.environ.get(name, "") for name in names)])
        Path("/dev/shm", f"deepspeed_allreduce_buffer_{job}_{rank}").unlink()

    def prepare(self, cell: Cell, buffers: Buffers) -> Loop:
        tensor = buffers.whole
        if cell.collective == NATIVE:
            loop = native.load().bench_operator
            return lambda calls: loop("deepspeed::inference_all_reduce_", tensor, calls)
        operator = torch.ops.deepspeed.inference_all_reduce_.default
        return repeated(lambda: operator(tensor))


def _load() -> ModuleType:
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"  # it may bring an OpenMP runtime of its own
    builders = importlib.import_module("deepspeed.ops.op_builder.cpu")
    module: ModuleType = builders.ShareMemCommBuilder().load(verbose=False)
    return module
