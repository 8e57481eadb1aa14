"""Save a sharded model and its optimizer with torch.distributed.checkpoint, and resume.

Training runs for ten steps, with a checkpoint after the fifth. A second model, sharded in the same
way, loads the checkpoint and repeats the last five steps. An unsharded model loads the checkpoint
whole and repeats them too: any number of ranks can load a checkpoint. All losses must agree.

    torchrun --standalone --nproc-per-node 2 examples/checkpoint.py
"""

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH, WIDTH = 32, 64
HALF = 5  # steps before and after the checkpoint


class Training:
    """A model and its optimizer: sharded over `mesh`, or whole on every rank if `mesh` is None."""

    def __init__(self, seed: int, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(seed)
        self.mesh = mesh
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4)

    def run(self, steps: range) -> torch.Tensor:
        """Run these training steps. Return the loss of each step, over the batch of all ranks."""
        return torch.tensor([self.step(step) for step in steps])

    def step(self, step: int) -> float:
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        if self.mesh is not None:
            batch = batch.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        loss = (self.model(batch) - batch.flip(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        mean = loss.detach()
        if self.mesh is not None:
            dist.all_reduce(mean, group=self.mesh.get_group())
            mean /= self.mesh.size()
        return float(mean)

    def save(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.save(state, checkpoint_id=folder)  # type: ignore[attr-defined]

    def load(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)  # type: ignore[attr-defined]
        set_state_dict(self.model, self.optimizer,
                       model_state_dict=model, optim_state_dict=optimizer)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hbm")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    before, after = range(HALF), range(HALF, 2 * HALF)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # all ranks use the folder of rank 0

        original = Training(seed=0, mesh=mesh)
        original.run(before)
        original.save(folder[0])
        expected = original.run(after)

        losses = {}
        for name, resumed in {"sharded": Training(1, mesh), "whole": Training(2, None)}.items():
            resumed.load(folder[0])
            losses[name] = resumed.run(after)
        dist.barrier()

    good = torch.equal(losses["sharded"], expected) and torch.allclose(losses["whole"], expected)
    if not good:
        print(f"FAILED: rank {dist.get_rank()}: losses {losses}, expected {expected}")
    elif dist.get_rank() == 0:
        print(f"OK: resumed after step {HALF}; the losses of the next {HALF} steps are the same "
              f"to the bit, and the same to rounding in an unsharded model")  # fmt: skip
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
