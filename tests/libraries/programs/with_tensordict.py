"""Trains with gradients in a TensorDict, which the ranks reduce, gather and send to each other."""

from __future__ import annotations

import digits
import evidence
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.functional import cross_entropy


def exchange(gradients: TensorDict, step: int) -> TensorDict:
    """Return the gradients of the other rank, by a way that depends on the step."""
    rank = dist.get_rank()
    other = 1 - rank
    received = gradients.clone().zero_()
    if step % 3 == 0:
        works = received.irecv(other, return_premature=True, init_tag=100)
        for work in works + gradients.isend(other, return_early=True, init_tag=100):
            work.wait()
    elif step % 3 == 1:
        for sender in range(2):
            if rank == sender:
                gradients.send(other, pseudo_rand=True, init_tag=7)
            else:
                received.recv(other, pseudo_rand=True, init_tag=7)
    else:
        packed, received = (values.consolidate(metadata=True) for values in (gradients, received))
        for sender in range(2):
            if rank == sender:
                packed.send(other, consolidated=True)
            else:
                received.recv(other, consolidated=True)
    return received


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == 2
    network = digits.network()
    with torch.no_grad():
        for value in network.parameters():
            value.mul_(1 + rank)  # broadcast() below must undo this
    weights = TensorDict({name: value.detach() for name, value in network.named_parameters()})
    weights.update_(weights.broadcast(src=0))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    images, labels = digits.dataset().tensors
    losses, others, sums, stacks = [], [], [], []
    for step in range(18):
        own = torch.arange(digits.IMAGES)[rank + step % 8 :: 8 * size]
        optimizer.zero_grad()
        loss = cross_entropy(network(images[own]), labels[own])
        loss.backward()
        gradients = TensorDict({name: value.grad for name, value in network.named_parameters()})
        others.append(exchange(gradients, step)["0.bias"].clone())
        copy = gradients.clone()
        copy.reduce(dst=0, bucket_bytes=1 << 16 if step % 2 else None)
        sums.append(copy["2.bias"] if rank == 0 else torch.zeros(10))
        if rank == 0:  # a row for each other rank
            stack = TensorDict({"loss": torch.zeros(size - 1)}, batch_size=[size - 1])
        else:
            stack = TensorDict({"loss": loss.detach()})
        stack.gather_and_stack(dst=0)
        stacks.append(stack["loss"].reshape(1))
        gradients.all_reduce(bucket_bytes=1 << 16 if step % 2 else None)
        with torch.no_grad():
            for value in network.parameters():
                assert value.grad is not None
                value.grad /= size
        optimizer.step()
        losses.append(loss.item())
    gathered = TensorDict({"losses": torch.tensor(losses[: 17 + rank])}).all_gather()  # uneven
    if rank == 0:
        weights.init_remote(dst=1)
    else:
        received = TensorDict.from_remote_init(src=0)
        assert all((received[name] == weights[name]).all() for name in weights.keys())  # noqa: SIM118
    evidence.write(
        options.folder, losses, network, dist.group.WORLD,
        others=torch.stack(others), sums=torch.stack(sums), stacks=torch.cat(stacks),
        gathered=torch.cat([values["losses"] for values in gathered]),
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
