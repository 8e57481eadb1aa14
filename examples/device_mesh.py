"""Tensor parallelism within pairs of ranks, data parallelism between the pairs: a 2 x 2 mesh.

A DeviceMesh makes a process group of every row and every column of a grid of ranks. Along "tp"
the two matrices of an MLP are split over two ranks; along "dp" the gradients from the two halves
of the batch are averaged. One step of training must give the same weights as a single process that
trains on the whole batch.

    torchrun --standalone --nproc-per-node 4 examples/device_mesh.py
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

BATCH, WIDTH, HIDDEN = 64, 32, 128


def mlp() -> nn.Sequential:
    torch.manual_seed(0)  # the same parameters on every rank
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


def step(model: nn.Module, inputs: Tensor, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """Take one step of gradient descent. Return the parameters, unsharded."""
    model(inputs).square().mean().backward()
    if mesh is not None:
        for parameter in model.parameters():
            average_gradient(parameter, mesh["dp"])
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def average_gradient(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    assert parameter.grad is not None
    own = local(parameter.grad)
    dist.all_reduce(own, group=mesh.get_group())
    own.div_(mesh.size())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a distributed tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(parameter: nn.Parameter) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hbm")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))

    model = mlp()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    share = inputs.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    found = step(model, share, mesh)
    expected = step(mlp(), inputs)

    difference = max((found[name] - expected[name]).abs().max().item() for name in expected)
    worst = torch.tensor(difference)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    good = worst.item() < 1e-5
    split = dict(model.named_parameters())["0.weight"]
    print(f"rank {dist.get_rank()}: row {mesh['dp'].get_local_rank()}, column "
          f"{mesh['tp'].get_local_rank()}, holds {tuple(local(split).shape)} "
          f"of the {tuple(split.shape)} first matrix", flush=True)  # fmt: skip
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{'OK' if good else 'FAILED'}: weights of the 2 x 2 mesh are at most "
              f"{worst.item():.1e} from those of a single process")  # fmt: skip
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
