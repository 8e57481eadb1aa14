"""DeepSpeed's allreduce through shared memory. benchmarks/README.md has the commands to install it.

DeepSpeed compiles this operator on first use. The operator always works among all ranks of the
machine. It leaves its segments in /dev/shm, so this module removes them.
"""

import importlib
import importlib.util
import os
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load_inline

from torch_hbmcomm.bench.buffers import Buffers, check
from torch_hbmcomm.bench.contenders import Call, PythonContender
from torch_hbmcomm.bench.rounds import Timed


class DeepSpeed(PythonContender):
    name = "deepspeed"
    about = "DeepSpeed's shared-memory operator"
    dtypes = ("float32", "float16", "bfloat16")

    def why_unavailable(self) -> str | None:
        if importlib.util.find_spec("deepspeed") is None:
            return "it is not installed; benchmarks/README.md has the commands"
        try:
            _load()
            _loop()
        except Exception as error:  # DeepSpeed and compilers raise many types
            return f"its operator does not load: {error}"
        return None

    def offers(self, collective: str, dtype: str, size: int) -> bool:
        return collective == "allreduce" and dtype in self.dtypes

    def open(self) -> None:
        _join()

    def call(self, collective: str, buffers: Buffers) -> Call:
        tensor, operator = buffers.whole, torch.ops.deepspeed.inference_all_reduce_.default
        return lambda: operator(tensor)


class DeepSpeedInC(DeepSpeed):
    name = "deepspeed-c"
    about = "the same, called by a loop of C++"

    def prepare(self, collective: str, buffers: Buffers) -> Timed:
        check(collective, self.call(collective, buffers), buffers)
        tensor, loop = buffers.whole, _loop()
        return lambda samples, calls: loop.run(tensor, samples, calls)


@cache
def _join() -> None:
    """Open the segments of all ranks. Both contenders use the same segments."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_SIZE"] = str(ranks)  # with another number the operator does nothing
    _load().initialize(ranks, rank)
    dist.barrier()  # every rank has opened every segment
    names = ("MASTER_ADDR", "MASTER_PORT")
    job = "_".join([str(os.getuid()), *(os.environ.get(name, "") for name in names)])
    Path("/dev/shm", f"deepspeed_allreduce_buffer_{job}_{rank}").unlink()


def _load() -> ModuleType:
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"  # the operator may load a second OpenMP runtime
    builders = importlib.import_module("deepspeed.ops.op_builder.cpu")
    module: ModuleType = builders.ShareMemCommBuilder().load(verbose=False)
    return module


_LOOP = """
#include <ATen/core/dispatch/Dispatcher.h>
#include <chrono>
std::vector<double> run(at::Tensor tensor, int64_t samples, int64_t calls) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      "deepspeed::inference_all_reduce_", "").typed<at::Tensor&(at::Tensor&)>();
  std::vector<double> found;
  op.call(tensor);
  for (int64_t sample = 0; sample < samples; ++sample) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t call = 0; call < calls; ++call) op.call(tensor);
    const auto end = std::chrono::steady_clock::now();
    const std::chrono::duration<double, std::micro> taken = end - start;
    found.push_back(taken.count() / calls);
  }
  return found;
}
"""


@cache
def _loop() -> ModuleType:
    """Return a module that calls the operator in a loop of C++. The first call compiles it."""
    module: ModuleType = load_inline("hbm_bench_operator", [_LOOP], functions=["run"])
    return module
