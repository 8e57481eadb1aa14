"""The methods of hbm's backend. It overrides each virtual function of c10d.Backend that applies."""

from __future__ import annotations

import ctypes
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

# Methods of c10d.Backend that hbm binds to Python again, with the same arguments, and why.
BOUND_ANEW = {
    "allocate_tensor": "the virtual behind it gives DDP pairs of real numbers for complex ones",
}

# Virtual functions of c10d.Backend, in PyTorch 2.11 to 2.15, that hbm does not override, and why.
NOT_OVERRIDDEN = {
    "addEphemeralTimeout": "experimental, for NCCL's watchdog; optional by its contract",
    "all_gather_single": "the base class calls _allgather_base, its older name",
    "all_gather_single_coalesced": "likewise allgather_into_tensor_coalesced",
    "all_to_all_single": "likewise alltoall_base",
    "eagerConnectSingleDevice": "connects to a GPU; hbm has connected when the group is formed",
    "endTimeEstimate": "see supportsTimeEstimation",
    "gather_into_tensor": "the base class calls gather_single, its newer name",
    "getBoundDeviceId": "the base class keeps it",
    "isInitialized": "true in the base class: hbm has connected when the group is formed",
    "reduce_scatter_single": "the base class calls _reduce_scatter_base, its older name",
    "reduce_scatter_single_coalesced": "likewise reduce_scatter_tensor_coalesced",
    "registerCompletionHook": "see supportsCompletionHooks",
    "registerOnCompletionHook": "NCCL's watchdog calls such hooks; hbm has none, and Works futures",
    "resume": "gives a GPU the memory back that suspend() took",
    "setBoundDeviceId": "the base class keeps it",
    "setGroupUid": "the base class keeps it",
    "startTimeEstimate": "see supportsTimeEstimation",
    "supportsCompletionHooks": "for a watchdog, which sees Works end; futures tell of it",
    "supportsTimeEstimation": "NCCL's model of its own collectives",
    "suspend": "takes memory from a GPU while nothing communicates",
    "unregisterCompletionHook": "see supportsCompletionHooks",
    "waitForPendingWorks": "for the hooks of registerOnCompletionHook",
}
PGHBM = Path(__file__).parents[3] / "csrc" / "pg_hbm.h"
HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/Backend.hpp"

gather_single: Any = getattr(dist, "gather_single", None)


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
    # clone() is a virtual function of Backend::Options, not of Backend.
    # csrc/process_group/options.h overrides it.
    virtuals = set(re.findall(r"virtual\s[^;{(]*?(\w+)\(", theirs)) - {"clone"}
    assert {"allreduce", "merge", "getError"} <= virtuals, "the header reads otherwise now"
    ours = set(re.findall(r"(\w+)\([^;{]*\)\s*(?:const\s*)?override\b", own))
    assert virtuals - ours <= set(NOT_OVERRIDDEN)
    assert not ours & set(NOT_OVERRIDDEN)


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


def check_gather_single(context: Context) -> None:
    root = context.size - 1
    data = torch.rand(2, 3, generator=context.generator)
    for shape in ((context.size * 2, 3), (context.size, 2, 3)):
        got = torch.zeros(shape) if context.rank == root else None
        gather_single(data, got, dst=root)
        wanted = [torch.empty(2, 3) for _ in range(context.size)] if context.rank == root else None
        dist.gather(data, wanted, dst=root)
        if got is not None and wanted is not None:
            assert torch.equal(got.reshape(-1), torch.cat(wanted).reshape(-1))


@pytest.mark.skipif(gather_single is None, reason="PyTorch 2.14 brought it")
def test_gather_into_one_tensor(pool: Pool) -> None:
    pool.run(check_gather_single)


def test_flight_recorder_is_unavailable_without_pytorchs_hook() -> None:
    """hbm's operations are not in the flight recorder: docs/process-group.md says why.

    This test fails with a PyTorch that exports the recorder. hbm can then begin to use it.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    found = hasattr(library, "_ZN4c10d14FlightRecorderIN3c105EventEE3getEv")
    assert not found or hasattr(torch._C._distributed_c10d, "FlightRecorderHook")
