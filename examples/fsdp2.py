"""Train a small transformer with fully sharded data parallelism (FSDP2), in fp32 and in bf16.

Each rank keeps only its shard of every parameter. FSDP2 gathers the full parameters just before a
layer needs them, and reduce-scatters the gradients. Every rank also trains an unsharded copy on the
whole batch, and compares the losses of both models.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

TOKENS, LENGTH, BATCH, STEPS = 32, 16, 32, 40  # BATCH: of all ranks together
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.15}  # absolute, of the loss


class Reverser(nn.Module):
    """Learns to reverse a sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 64)
        self.position = nn.Parameter(torch.randn(LENGTH, 64))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.flatten(0, 1))
        return logits  # (sequences * LENGTH, TOKENS)


def reverser() -> Reverser:
    torch.manual_seed(0)  # the same parameters on every rank
    return Reverser()


def train(model: nn.Module, share: slice) -> list[float]:
    """Train on `share` of every batch, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=generator)[share]
        loss = cross_entropy(model(tokens).float(), tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_sharded(mesh: DeviceMesh, dtype: torch.dtype) -> list[float]:
    """Train on this rank's share of every batch. Return the losses over the whole batches."""
    model = reverser()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    each = BATCH // mesh.size()
    losses = torch.tensor(train(model, slice(mesh.get_rank() * each, (mesh.get_rank() + 1) * each)))
    dist.all_reduce(losses)
    return (losses / mesh.size()).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hbm")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = torch.tensor(train(reverser(), slice(None)))
    good = True
    for dtype, tolerance in TOLERANCES.items():
        losses = torch.tensor(train_sharded(mesh, dtype))
        difference = (losses - expected).abs().max().item()
        good &= difference <= tolerance
        if dist.get_rank() == 0:
            print(f"{'OK' if difference <= tolerance else 'FAILED'}: FSDP2 {dtype} on "
                  f"{mesh.size()} ranks: loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
                  f"at most {difference:.1e} from the unsharded model")  # fmt: skip
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
