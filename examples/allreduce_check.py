"""Sum random tensors over all ranks, and compare with the sum that each rank computes alone.

    torchrun --standalone --nproc-per-node 2 examples/allreduce_check.py --mib 64

two_nodes.sh runs it over a network.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist


def contribution(rank: int, iteration: int, numel: int) -> torch.Tensor:
    """Return the tensor that `rank` adds to the sum. Seeds are fixed, so any rank can draw it."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    return torch.rand(numel, generator=generator)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hbm")
    parser.add_argument("--mib", type=int, default=16, help="size of the tensor")
    parser.add_argument("--iterations", type=int, default=3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = args.mib * 2**20 // 4
    dist.barrier()  # makes the connections before the measurement

    worst, seconds = 0.0, 0.0
    for iteration in range(args.iterations):
        tensor = contribution(rank, iteration, numel)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds += time.perf_counter() - start
        expected = sum(contribution(other, iteration, numel) for other in range(size))
        worst = max(worst, (tensor - expected).abs().max().item())
    good = worst <= 1e-6 * size
    if not good:
        print(f"FAILED: rank {rank}: allreduce is off by {worst:.1e}")
    elif rank == 0:
        print(f"OK: {args.iterations} allreduces of {args.mib} MiB on {size} ranks over "
              f"{args.backend}, {1000 * seconds / args.iterations:.1f} ms each")  # fmt: skip
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
