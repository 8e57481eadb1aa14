"""A destroyed group leaves one key for each rank in the store."""

from __future__ import annotations

import pytest
from harness import beyond_gloo
from harness.network import free_port
from harness.warm import run_warm

pytestmark = beyond_gloo

GROUPS = """
import os, time, datetime
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

layout, agent, port = {layout!r}, {agent}, {port}
size = len(layout)
rank, children = 0, []
if agent:  # the parent serves the store, as torchrun's agent does
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(port))
for other in range(0 if agent else 1, size):
    child = os.fork()
    if child == 0:
        rank, children, agent = other, [], False
        break
    children.append(child)
serves = bool(children)
store = TCPStore("127.0.0.1", port, None, serves, wait_for_workers=False)
if not agent:
    os.environ["HBMCOMM_NODE_ID"] = layout[rank]
    dist.init_process_group("hbm", store=store, rank=rank, world_size=size)

    def use(group):
        dist.all_reduce(torch.ones(3), group=group)
        backend = dist.distributed_c10d._get_default_group() if group is None else group
        backend = backend._get_backend(torch.device("cpu"))
        for _ in range(3):
            backend.monitored_barrier(datetime.timedelta(seconds=60))

    def number_of_keys():
        dist.barrier()
        found = torch.tensor(store.num_keys())
        dist.broadcast(found, 0)
        return found.item()

    use(None)  # MPI's world leaves keys, once in a process
    before = number_of_keys()
    for count in range(1, 4):
        group = dist.new_group()
        use(group)
        dist.destroy_process_group(group)
        end = time.monotonic() + 60  # a busy store removes keys late
        while (found := number_of_keys()) != before + count * size:
            assert time.monotonic() < end, (before, count, found)
    dist.destroy_process_group()
assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
"""


@pytest.mark.parametrize("layout", ["aa", "ab", "aab"])
@pytest.mark.parametrize("agent", [False, True])
def test_a_destroyed_group_leaves_one_key_for_each_rank(layout: str, agent: bool) -> None:
    finished = run_warm(GROUPS.format(layout=layout, agent=agent, port=free_port()))
    assert (finished.code, finished.output) == (0, "")


KEEPING = """
import datetime, torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

class KeepingStore(dist.Store):
    '''Lacks delete_key().'''

    def __init__(self):
        super().__init__()
        self.below = HashStore()

    def set(self, key, value): return self.below.set(key, value)
    def get(self, key): return self.below.get(key)
    def add(self, key, amount): return self.below.add(key, amount)
    def check(self, keys): return self.below.check(keys)
    def compare_set(self, key, expected, desired):
        return self.below.compare_set(key, expected, desired)

store = KeepingStore()
dist.init_process_group("hbm", store=store, rank=0, world_size=1)
backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
for _ in range(2):
    backend.monitored_barrier(datetime.timedelta(seconds=60))
dist.destroy_process_group()
"""


def test_a_store_that_cannot_delete_keeps_its_keys() -> None:
    finished = run_warm(KEEPING)
    assert (finished.code, finished.output) == (0, "")
