"""A rank of a job over a link with a delay: distant_script.py OPERATION

It calls the operation twice, checks the results, and prints "done".
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

COUNT = 8 << 20  # elements of float32
CALLS = 2


def call(operation: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.full((COUNT,), float(rank + 1))
    if operation == "all_reduce":
        dist.all_reduce(values)
        expected = size * (size + 1) / 2
    elif operation == "broadcast":
        dist.broadcast(values, 0)
        expected = 1.0
    elif operation == "send":
        if rank == 0:
            dist.send(values, size - 1)
        elif rank == size - 1:
            dist.recv(values, 0)
        expected = 1.0 if rank == size - 1 else rank + 1.0
    elif operation == "all_to_all":
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values)
        values = received.view(size, -1)
        expected = torch.arange(1.0, size + 1).unsqueeze(1)  # type: ignore[assignment]
    else:
        raise ValueError(operation)
    assert bool((values == expected).all()), operation


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("hbm")
    for _ in range(CALLS):
        call(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
