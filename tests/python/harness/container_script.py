"""The script of the tests in containers: collectives of random data against a plain reference.

Arguments: the store's file, a seed, and a layout as in harness.nodes, for example "aabb".
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from harness.context import BACKEND
from harness.nodes import reduced_over_nodes

COUNTS = (1, 1000, 300_001)


def check(seed: int, layout: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = torch.Generator().manual_seed(seed)  # draws the same on every rank
    for count in COUNTS:
        inputs = [torch.randn(count, generator=data) for _ in range(ranks)]
        root = int(torch.randint(ranks, (), generator=data))

        mine = inputs[rank].clone()
        dist.all_reduce(mine)
        # The bits depend on the order of additions, so they show which ranks share a node.
        assert torch.equal(mine, reduced_over_nodes(inputs, "sum", layout)), count

        mine = inputs[rank].clone()
        dist.broadcast(mine, root)
        assert torch.equal(mine, inputs[root]), count

        parts = [torch.empty(count) for _ in range(ranks)]
        dist.gather(inputs[rank], parts if rank == root else None, root)
        assert rank != root or all(map(torch.equal, parts, inputs)), count

        dist.all_gather(parts, inputs[rank])
        assert all(map(torch.equal, parts, inputs)), count

        received = torch.empty(count)
        sending = dist.isend(inputs[rank], (rank + 1) % ranks)
        dist.recv(received, (rank - 1) % ranks)
        assert sending is not None
        sending.wait()
        assert torch.equal(received, inputs[rank - 1]), count


def main(store: str, seed: str, layout: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    check(int(seed), layout)
    print(f"rank {rank} of {ranks} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
