"""Trains with torchft: each rank is a replica group by itself, and rank 0 serves the lighthouse.

torchft makes its groups from the class ProcessGroupGloo, not by the name of a backend.

With the program's own argument "death", the last rank dies in the middle of a step halfway through
the training, and the live ranks continue. This training does not use torchft's DDP: if an allreduce
fails, its own assertion (0.2.0) fails too, also over Gloo.
"""

from __future__ import annotations

import os
from datetime import timedelta

import digits
import evidence
import torch
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

TIMEOUT = timedelta(seconds=60)
STEPS = 20


def meet(store: FileStore, where: str, rank: int, ranks: int) -> None:
    store.set(f"{where} {rank}", "")
    store.wait([f"{where} {other}" for other in range(ranks)])


def main() -> None:
    options = evidence.options()
    death = options.rest == ["death"]
    rank, last = int(os.environ["RANK"]), options.ranks - 1
    meeting = FileStore(str(options.folder / "meeting"), options.ranks)
    if rank == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000)
        meeting.set("lighthouse", lighthouse.address())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    network = digits.network()
    inner = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    group = ProcessGroupGloo(timeout=TIMEOUT)

    def state() -> dict[str, object]:
        return {"network": network.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        network.load_state_dict(state["network"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=group, load_state_dict=load, state_dict=state, min_replica_size=1,
        timeout=TIMEOUT, quorum_timeout=TIMEOUT, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
        lighthouse_addr=meeting.get("lighthouse").decode(), replica_id=f"replica_{rank}",
    )  # fmt: skip
    # All ranks register first: a quorum consists of the replicas that the lighthouse knows.
    meet(meeting, "ready", rank, options.ranks)
    model = network if death else DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, inner)
    images, labels = digits.dataset().tensors
    losses = []
    for step in range(STEPS):
        own = torch.arange(digits.IMAGES)[rank + step :: 3 * options.ranks]
        optimizer.zero_grad()
        loss = cross_entropy(model(images[own]), labels[own])
        if death and rank == last and step == STEPS // 2:
            manager.wait_quorum()  # now the quorum of this step includes this rank
            os._exit(0)  # for any other status torchrun would end the live ranks
        loss.backward()
        if death:
            for parameter in network.parameters():
                manager.allreduce(parameter.grad).wait()
        optimizer.step()
        losses.append(loss.item())
    evidence.write(options.folder, losses, model, group.parent, committed=manager.current_step())
    meet(meeting, "done", rank, last if death else options.ranks)
    manager.shutdown(wait=False)
    if rank == 0:
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
