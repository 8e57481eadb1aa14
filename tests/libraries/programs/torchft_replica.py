"""One replica group of a training with torchft. The test starts it again after its death.

    torchft_replica.py FOLDER METHOD REPLICA STEPS DEATH

The group has one rank. METHOD says what averages over the groups: "manager" (the manager's
allreduce of each gradient), "ddp", "localsgd" or "diloco". A step is one commit: with the last two
methods it has INNER steps of the optimizer. The training ends after STEPS commits.

After DEATH commits the process kills itself in the next step, when the quorum includes this group
and the other group waits for it. With "ddp" it kills itself before it asks for the quorum. (If an
allreduce fails, an assertion of torchft's DDP 0.2.0 ends the other process too, also over Gloo.)
A negative DEATH never comes.

Each step appends a line to FOLDER/replica*.jsonl, as a dict:

    process: the id of this process
    participating: this group's data counted in this step
    committed: the optimizer stepped
    step: commits so far, after this step
    loss: the loss of the step's last batch
    before, after: digests of the weights before and after the step
    backend: the class of the backend
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import digits
import torch
from torch._C._distributed_c10d import TCPStore
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.local_sgd import DiLoCo, LocalSGD

TIMEOUT = timedelta(seconds=600)  # above the time in which a killed group starts again
INNER = 2
BATCH = 32
METHODS = ("ddp", "diloco", "localsgd", "manager")
LOCAL = ("diloco", "localsgd")  # methods whose optimizers step between the commits


class MortalManager(Manager):  # type: ignore[misc]
    """A manager whose process kills itself before the call `moment`, after `death` commits."""

    moment = ""
    death = -1

    def start_quorum(self, *args: Any, **kwargs: Any) -> None:
        if self.moment == "start_quorum":
            self._die_if_due()
        super().start_quorum(*args, **kwargs)

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        if self.moment == "allreduce" and not self.errored():
            self.wait_quorum()
            self._die_if_due()
        return super().allreduce(*args, **kwargs)

    def _die_if_due(self) -> None:
        if self.current_step() == self.death:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(network: torch.nn.Module) -> str:
    weights = parameters_to_vector(network.parameters()).detach()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("replica", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("death", type=int)
    asked = parser.parse_args()
    method = asked.method

    network = digits.network()
    inner = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

    def state() -> dict[str, object]:
        return {"network": network.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, dict[str, Any]]) -> None:
        network.load_state_dict(state["network"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=TIMEOUT)
    manager = MortalManager(
        pg=group, load_state_dict=load, state_dict=state, min_replica_size=1,
        use_async_quorum=method != "diloco", timeout=TIMEOUT, quorum_timeout=TIMEOUT,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
        replica_id=f"replica_{asked.replica}",
    )  # fmt: skip
    manager.moment = "start_quorum" if method == "ddp" else "allreduce"
    manager.death = asked.death

    model = DistributedDataParallel(manager, network) if method == "ddp" else network
    optimizer = inner if method in LOCAL else Optimizer(manager, inner)
    outer = torch.optim.SGD(network.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    around: AbstractContextManager[Any] = nullcontext()
    if method == "diloco":
        around = DiLoCo(manager, [network], inner, outer, sync_every=INNER)
    elif method == "localsgd":
        around = LocalSGD(manager, network, inner, sync_every=INNER)
    images, labels = digits.dataset().tensors
    with around, open(asked.folder / f"replica{asked.replica}.jsonl", "a") as log:
        while (start := manager.current_step()) < asked.steps:
            before = digest(network)
            failures = manager._commit_failures
            for part in range(INNER if method in LOCAL else 1):
                batch = 2 * (INNER * start + part) + asked.replica
                own = torch.arange(batch * BATCH, (batch + 1) * BATCH) % digits.IMAGES
                optimizer.zero_grad()
                loss = cross_entropy(model(images[own]), labels[own])
                loss.backward()
                if method == "manager":
                    for parameter in network.parameters():
                        manager.allreduce(parameter.grad).wait()
                optimizer.step()
            line = {
                "process": os.getpid(),
                "participating": manager.is_participating(),
                "committed": manager._commit_failures <= failures,
                "step": manager.current_step(),
                "loss": loss.item(),
                "before": before,
                "after": digest(network),
                "backend": type(group.parent._get_backend(torch.device("cpu"))).__name__,
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
