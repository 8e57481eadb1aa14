"""Reports the nodes of tensors, as pages.cpp does: part of torch_programs.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import memory

MIB = 1 << 20


def report(name: str, tensor: torch.Tensor) -> None:
    block = {"address": tensor.data_ptr(), "bytes": tensor.nbytes, "where": memory.where(tensor)}
    print(json.dumps({"name": name, "refusal": "", "blocks": [block]}))
    print(Path("/proc/self/numa_maps").read_text(), flush=True)


def main() -> None:
    for policy in get_args(memory.Policy):
        report(f"empty {policy}", memory.empty(8 * MIB, torch.uint8, policy).fill_(1))
    dist.init_process_group("hbm", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    layer = torch.nn.Linear(1024, 1024)
    model = DistributedDataParallel(layer, gradient_as_bucket_view=True)
    for step in range(2):  # DDP rebuilds its buckets after the first step
        model(torch.ones(1, 1024)).sum().backward()
        assert layer.weight.grad is not None
        report(f"bucket of step {step}", layer.weight.grad)
    dist.destroy_process_group()
