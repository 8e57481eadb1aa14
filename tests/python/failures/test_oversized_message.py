"""A rank that gets a too long message learns the sender's operation from the sender's report."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.fates import Ranks

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

# The sender's report may come too late for the receiver's error. This happens in less than 1/3 of
# the attempts, even on a busy machine; in all attempts with a probability below 1e-9.
ATTEMPTS = 20
HEARD = " has failed: rank 1: ranks disagree in "


def all_reduce(rank: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(10 if rank == 0 else 1000), group=group)


def all_gather(rank: int, group: dist.ProcessGroup) -> None:
    data = torch.ones(10 if rank == 0 else 1000)
    dist.all_gather([torch.empty_like(data) for _ in range(2)], data, group=group)


def two_operations(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 0:
        dist.barrier(group=group)
    else:
        dist.all_reduce(torch.ones(1000), group=group)


CALLS = {call.__name__: call for call in (all_reduce, all_gather, two_operations)}


def disagree(pipe: Connection, rank: int, url: str, name: str) -> list[str]:
    """Disagree until an error of rank 0 has the report of rank 1. Return this rank's errors."""
    del pipe
    dist.init_process_group("hbm", init_method=url, rank=rank, world_size=2)
    errors: list[str] = []
    heard = torch.zeros(1)
    while not heard.item() and len(errors) < ATTEMPTS:
        group = dist.new_group([0, 1])
        with pytest.raises(dist.DistBackendError) as error:
            CALLS[name](rank, group)
        errors.append(str(error.value))
        heard.fill_(rank == 0 and HEARD in errors[-1])
        dist.all_reduce(heard)
    dist.destroy_process_group()
    return errors


@pytest.mark.parametrize("name", CALLS)
def test_the_error_has_the_operation_of_the_sender(name: str, tmp_path: Path) -> None:
    with Ranks(2, disagree, f"file://{tmp_path}/store", name, layout="ab") as ranks:
        receiver, sender = ranks.hear(0, 1)
    assert not receiver.error, receiver
    assert HEARD in receiver.value[-1], receiver.value
    assert all("sent more than that" in text for text in receiver.value), receiver.value
    assert all("ranks disagree" in text for text in sender.value), sender.value
