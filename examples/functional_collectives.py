"""Collectives that return their result, as autograd and torch.compile require.

DTensor and FSDP2 build on torch.distributed._functional_collectives. Here one function calls four
of these collectives. The function runs eagerly and under torch.compile. Both results must equal the
result of plain arithmetic on the inputs of all ranks.

    torchrun --standalone --nproc-per-node 2 examples/functional_collectives.py

The default compiler, aot_eager, traces the graph without generating code; --compiler inductor
generates C++ (about a minute the first time).
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

ROWS, COLUMNS = 6, 1024  # ROWS: of the block that one rank sends to another

Results = dict[str, Tensor]


def collectives(own: Tensor, group: dist.ProcessGroup) -> Results:
    """Call collectives before and after arithmetic.

    A compiler may fuse the arithmetic, but must not move it across a collective.
    """
    doubled = own * 2
    return {
        "all_reduce": funcol.all_reduce(doubled, "sum", group) + 1,
        "all_gather_single": funcol.all_gather_single(doubled, 0, group) + 1,
        "reduce_scatter_single": funcol.reduce_scatter_single(doubled, "sum", 0, group) + 1,
        "all_to_all_single": funcol.all_to_all_single(doubled, None, None, group) + 1,
    }


def reference(inputs: list[Tensor], rank: int) -> Results:
    """Return the results of collectives() on `rank`, computed without communication."""
    doubled = [tensor * 2 for tensor in inputs]
    total = torch.stack(doubled).sum(0)
    blocks = [tensor.chunk(len(inputs))[rank] for tensor in doubled]
    return {
        "all_reduce": total + 1,
        "all_gather_single": torch.cat(doubled) + 1,
        "reduce_scatter_single": total.chunk(len(inputs))[rank] + 1,
        "all_to_all_single": torch.cat(blocks) + 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hbm")
    parser.add_argument("--compiler", default="aot_eager", help="a backend of torch.compile")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = init_device_mesh("cpu", (size,)).get_group()
    generator = torch.Generator().manual_seed(0)  # all ranks draw the inputs of all ranks
    inputs = [torch.randn(size * ROWS, COLUMNS, generator=generator) for _ in range(size)]
    expected = reference(inputs, rank)

    compiled = torch.compile(collectives, backend=args.compiler, fullgraph=True)
    found = {
        "eager": collectives(inputs[rank], group),
        args.compiler: compiled(inputs[rank], group),
    }
    wrong = [
        f"{name} ({mode})"
        for mode, results in found.items()
        for name, result in results.items()
        if not torch.allclose(result, expected[name], atol=1e-5)
    ]
    if wrong:
        print(f"FAILED: rank {rank}: wrong results of {', '.join(wrong)}")
    dist.barrier()
    if rank == 0 and not wrong:
        print(f"OK: {', '.join(expected)} on {size} ranks, eager and compiled by {args.compiler}")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
