"""The group's object as c10d.Backend: which of its methods hbm has, and that none is hidden."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from torch._C._distributed_c10d import Backend

from torch_hbmcomm.native import load

pytestmark = beyond_gloo

# Names of c10d.Backend that hbm binds anew, with the same arguments.
BOUND_ANEW = {
    "allocate_tensor": "the virtual behind it gives DDP pairs of real numbers for complex ones",
}


def backend() -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def test_no_name_hides_one_of_the_interface() -> None:
    own = {name for name in vars(load().ProcessGroupHbm) if not name.startswith("_")}
    assert own & set(dir(Backend)) == set(BOUND_ANEW)
    for name in BOUND_ANEW:
        ours = inspect.getdoc(getattr(load().ProcessGroupHbm, name)) or ""
        theirs = inspect.getdoc(getattr(Backend, name)) or ""
        assert ours.splitlines()[0].partition(", ")[2] == theirs.splitlines()[0].partition(", ")[2]


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
