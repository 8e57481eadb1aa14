"""The group's object as c10d.Backend: which of its methods hbm has, and that none is hidden."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from torch._C._distributed_c10d import Backend, FileStore
from torch.distributed.distributed_c10d import GroupName

from torch_hbmcomm.native import load

pytestmark = beyond_gloo

# Names of c10d.Backend that hbm binds anew, with the same arguments.
BOUND_ANEW = {
    "allocate_tensor": "the virtual behind it gives DDP pairs of real numbers for complex ones",
}

# The virtuals of c10d.Backend that hbm leaves as they are, and why.
NOT_OVERRIDDEN = {
    "eagerConnectSingleDevice": "connects to a GPU; hbm has connected when the group is formed",
    "registerOnCompletionHook": "NCCL's watchdog calls such hooks; hbm has none, and Works futures",
    "resume": "gives a GPU the memory back that suspend() took",
    "setGroupUid": "the base class keeps it",
    "shrink": "takes ranks out of NCCL's communicator; hbm forms a new group, of those that live",
    "supportsShrinking": "see shrink",
    "supportsTimeEstimation": "NCCL's model of its own collectives",
    "suspend": "takes memory from a GPU while nothing communicates",
    "waitForPendingWorks": "for the hooks of registerOnCompletionHook",
}
PGHBM = Path(__file__).parents[3] / "csrc" / "pg_hbm.h"
HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/Backend.hpp"


def backend() -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def test_no_name_hides_one_of_the_interface() -> None:
    own = {name for name in vars(load().ProcessGroupHbm) if not name.startswith("_")}
    assert own & set(dir(Backend)) == set(BOUND_ANEW)
    for name in BOUND_ANEW:
        ours = inspect.getdoc(getattr(load().ProcessGroupHbm, name)) or ""
        theirs = inspect.getdoc(getattr(Backend, name)) or ""
        assert ours.splitlines()[0].partition(", ")[2] == theirs.splitlines()[0].partition(", ")[2]


def test_every_virtual_is_implemented_or_does_not_apply() -> None:
    theirs, own = (re.sub(r"//.*", "", path.read_text()) for path in (HEADER, PGHBM))
    virtuals = set(re.findall(r"virtual\s[^;{(]*?(\w+)\(", theirs))
    assert {"allreduce", "merge", "getMemoryStats"} <= virtuals, "the header reads otherwise now"
    ours = set(re.findall(r"(\w+)\([^;{]*\)\s*(?:const\s*)?override\b", own))
    assert virtuals - ours == set(NOT_OVERRIDDEN)


def check_gather(context: Context) -> None:
    options = dist.GatherOptions()
    options.rootRank = 0
    got = [[torch.zeros(1) for _ in range(context.size)]] if context.rank == 0 else []
    backend().gather(got, [torch.full((1,), float(context.rank))], options).wait()
    if context.rank == 0:
        assert torch.cat(got[0]).tolist() == list(range(context.size))


@pytest.mark.ranks(2)
def test_gather_of_the_backend_object(pool: Pool) -> None:
    pool.run(check_gather)


def check_merge(context: Context) -> None:
    world = dist.distributed_c10d._get_default_group()
    own_timeout = backend().options._timeout
    parts = [world.split_group([rank], timeout=timedelta(seconds=30)) for rank in range(2)]
    mine = parts[context.rank]
    assert mine is not None and mine.size() == 1
    store = FileStore(str(context.folder / f"merge{context.seed}"), 2)
    merged = mine.merge_remote_group(store, 2, timedelta(seconds=40), GroupName("merged"))
    assert merged.size() == 2
    tensor = torch.full((3,), float(merged.rank() + 1))
    merged.allreduce([tensor]).wait()
    assert tensor.tolist() == [3.0] * 3
    options = merged._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=40)
    assert backend().options._timeout == own_timeout
    merged.shutdown()
    mine.shutdown()


@pytest.mark.ranks(2)
def test_groups_merge(fresh_pool: Pool) -> None:
    fresh_pool.run(check_merge)
