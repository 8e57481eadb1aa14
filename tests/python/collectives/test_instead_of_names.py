"""HBMCOMM_INSTEAD_OF=mpi, ucc or ccl: programs that say these names get hbm. PyTorch's wheels have
none of the three, so there is nothing to compare with; test_instead_of.py compares with Gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.jobs import BIN, Finished, assert_done, by_hand, run, run_code, torchrun
from harness.network import free_port
from harness.warm import run_warm

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

NAMES = ["mpi", "ucc", "ccl"]

# Prints the names and types that a program may look at, in a group of one.
LOOK = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def look(name):
    # PyTorch asserts the rank and the size of a store, and then ignores all three for MPI.
    dist.init_process_group(name, rank=0, world_size=1, store=dist.HashStore())
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    print(
        type(backend).__name__, backend.name(), group.name(), dist.get_backend(),
        dist.get_backend_config(), dist.is_backend_available(name), dist.Backend(name.upper()),
        model._get_ddp_logging_data()["backend_name"], group._get_sequence_number_for_group() >= 0,
    )
    dist.distributed_c10d._set_pg_timeout(dist.default_pg_timeout)
    dist.destroy_process_group()
"""
# Prints the ranges of two operations in the profiler, under each name in turn.
RANGES = """
import torch, torch.distributed as dist
for name in ("mpi", "ucc", "ccl", "gloo", "hbm"):
    dist.init_process_group(name, rank=0, world_size=1, store=dist.HashStore())
    with torch.profiler.profile() as profile:
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
            dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4))
    found = {one.name for one in profile.events() if one.name.split(":")[0] in (name, "hbm")}
    print("ranges:", *sorted(found))
    dist.destroy_process_group()
"""
SEEN = {
    "mpi": "ProcessGroupHbm mpi mpi mpi cpu:mpi,cuda:mpi True mpi mpi True",
    "ucc": "ProcessGroupHbm ucc ucc ucc cpu:ucc,cuda:ucc True ucc ucc True",
    "ccl": "ProcessGroupHbm ccl ccl ccl cpu:ccl,xpu:ccl True ccl ccl True",
    "gloo": "ProcessGroupHbm gloo gloo gloo cpu:gloo,cuda:gloo True gloo gloo True",
}
FOUND = """
import importlib, importlib.metadata, sys
before = len(sys.meta_path)
import torch, torch.distributed as dist
print(dist.is_mpi_available(), dist.is_ucc_available(), dist.is_backend_available("ccl"))
for module in ("oneccl_bindings_for_pytorch", "torch_ccl", "torch_ucc"):
    try: print(getattr(importlib.import_module(module), "__version__", module))
    except ModuleNotFoundError: print("no", module)
for asked in ("oneccl_bind_pt", "oneccl-bind-pt", "mpi"):
    try: print(importlib.metadata.version(asked))
    except importlib.metadata.PackageNotFoundError: print("no", asked)
listed = [one.name for one in importlib.metadata.distributions()]
print("in the list:", "oneccl_bind_pt" in listed)
print("finders:", len(sys.meta_path) - before, hasattr(dist, "ProcessGroupCCL"))
"""
NOT_FOUND = [
    "False False False",
    "no oneccl_bindings_for_pytorch",
    "no torch_ccl",
    "no torch_ucc",
    "no oneccl_bind_pt",
    "no oneccl-bind-pt",
    "no mpi",
    "in the list: False",
    "finders: 0 False",
]
CCL = """
import datetime, torch, torch.distributed as dist
import oneccl_bindings_for_pytorch
pair = dist.ProcessGroupCCL(dist.HashStore(), 0, 1, timeout=datetime.timedelta(seconds=60))
data = torch.ones(4)
pair.allreduce([data]).wait()
print(type(pair).__name__, pair.name(), pair.size(), data.tolist())
print(oneccl_bindings_for_pytorch.is_available([data]))
"""
UCC = """
import datetime, torch, torch.distributed as dist
pair = dist.ProcessGroupUCC(dist.HashStore(), 0, 1, timeout=datetime.timedelta(seconds=60))
data = torch.ones(4)
pair.allreduce([data]).wait()
print(type(pair).__name__, pair.name(), pair.size(), data.tolist())
"""
ONE_OF_MPI = """
import warnings
import torch, torch.distributed as dist
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    dist.init_process_group("mpi", rank=1, world_size=2)
print([str(one.message) for one in caught if "MPI" in str(one.message)])
print(dist.get_rank(), dist.get_world_size())
dist.barrier()
dist.destroy_process_group()
"""
GROUPS_OF_MPI = """
import torch, torch.distributed as dist
for attempt in range(2):
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, second = dist.new_group([0]), dist.new_group([1], backend="mpi")
    own = second if rank else alone
    data = torch.full((1000,), rank + 1.0)
    dist.all_reduce(data, group=own)
    assert (data == rank + 1).all()
    dist.all_reduce(data)
    assert (data == 3).all()
    assert own.name() == "mpi" and (alone if rank else second) == dist.GroupMember.NON_GROUP_MEMBER
    dist.destroy_process_group()
print(f"rank {rank} of {size} done")
"""
# The program serves a store of its own at MASTER_PORT, which PyTorch ignores for MPI.
OWN_STORE = """
import os, torch, torch.distributed as dist
rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
dist.init_process_group("mpi", store=store, rank=rank, world_size=size)
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
data = torch.ones(10)
dist.all_reduce(data)
assert (data == size).all()
dist.destroy_process_group()
print(f"rank {rank} of {size} done")
"""


def job(command: list[str | Path], name: str, **environment: str) -> Finished:
    """Run the job script with this name for its backend, as the variable asks."""
    ours = {"HBMCOMM_INSTEAD_OF": name, "HBMCOMM_TEST_BACKEND": name}
    return run(command, 400, **ours, **environment)


def lines(code: str, **environment: str) -> list[str]:
    return lines_of(run_warm(code, 400, **environment))


def lines_of(finished: Finished) -> list[str]:
    assert finished.code == 0, finished.output
    return finished.output.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_says_the_name_runs(name: str) -> None:
    assert_done(job(by_hand(2), name), 2)


def test_without_the_variable_pytorch_refuses_the_names() -> None:
    code = (
        LOOK
        + f"""
for name in {NAMES}:
    try: look(name)
    except (AssertionError, RuntimeError) as error: print("refused", name)
"""
    )
    assert lines(code, PYTHONWARNINGS="ignore") == [f"refused {name}" for name in NAMES]


def test_a_process_that_says_all_names_sees_these_names() -> None:
    code = LOOK + f"for name in {list(SEEN)}: look(name)"
    assert lines(code, HBMCOMM_INSTEAD_OF="all", PYTHONWARNINGS="ignore") == list(SEEN.values())


def test_ranges_in_the_profiler_begin_with_the_name() -> None:
    said = lines(RANGES, HBMCOMM_INSTEAD_OF="all", PYTHONWARNINGS="ignore")
    shown = [line.removeprefix("ranges: ") for line in said if line.startswith("ranges: ")]
    both = [f"{name}:all_reduce {name}:reduce_scatter_tensor" for name in ("mpi", "ucc", "ccl")]
    assert shown == [*both, "gloo:all_reduce", "hbm:all_reduce hbm:reduce_scatter_tensor"]


def test_a_list_leaves_the_other_names_to_pytorch() -> None:
    code = LOOK + "look('ccl'); look('ucc'); look('gloo')"
    ours = {"HBMCOMM_INSTEAD_OF": "ucc, ccl ,ucc", "PYTHONWARNINGS": "ignore"}
    ccl, ucc, gloo = lines(code, **ours)
    assert (ccl, ucc) == (SEEN["ccl"], SEEN["ucc"])
    assert gloo.startswith("ProcessGroupGloo gloo gloo"), gloo


def test_each_name_is_logged_once() -> None:
    code = LOOK + "for name in ('ucc', 'ucc', 'ccl'): look(name)"
    said = run_warm(code, HBMCOMM_INSTEAD_OF="all", HBMCOMM_LOG="info").output
    for name in ("ucc", "ccl"):
        assert said.count(f"HBMCOMM_INSTEAD_OF=all: groups of {name} for CPU tensors") == 1, said


# The ranks of a program that says "mpi".


def test_under_mpiexec_mpi_takes_the_launchers_ranks() -> None:
    command: list[str | Path] = [BIN / "mpiexec", "-n", "2", sys.executable, "-c", GROUPS_OF_MPI]
    assert_done(run(command, HBMCOMM_INSTEAD_OF="mpi"), 2)


def test_under_mpiexec_mpi_needs_no_variables_of_the_environment() -> None:
    command: list[str | Path] = [BIN / "mpiexec", "-n", "2", sys.executable, "-c", OWN_STORE]
    stale = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    port = str(free_port())
    assert_done(run(command, 120, HBMCOMM_INSTEAD_OF="mpi", MASTER_PORT=port, **stale), 2)


def test_under_torchrun_mpi_takes_the_environments_ranks() -> None:
    """srun --mpi=pmi2 gives a torchrun PMI's variables. They are not for the torchrun's ranks."""
    assert_done(job(torchrun(2), "mpi", PMI_RANK="0", PMI_SIZE="1"), 2)


def test_without_a_launcher_mpi_is_a_group_of_one() -> None:
    warned, ranks = lines(ONE_OF_MPI, HBMCOMM_INSTEAD_OF="mpi")
    assert "world_size (2) and rank (1) are ignored" in warned
    assert ranks == "0 1"


def test_under_a_launcher_without_pmi_mpi_raises() -> None:
    finished = run_warm(ONE_OF_MPI, HBMCOMM_INSTEAD_OF="mpi", SLURM_STEP_NUM_TASKS="2")
    assert finished.code != 0
    assert "SLURM_STEP_NUM_TASKS=2 processes were started" in finished.output, finished.output


# The modules and the metadata of torch-ccl and torch_ucc.


@pytest.mark.parametrize("names", ["", "gloo"])
def test_without_the_names_nothing_is_found(names: str) -> None:
    assert lines_of(run_code(FOUND, HBMCOMM_INSTEAD_OF=names)) == NOT_FOUND


def test_what_the_names_ask_for_is_found() -> None:
    found = lines_of(run_code(FOUND, HBMCOMM_INSTEAD_OF="all"))
    version = "2.8.0+hbm"
    assert found == [
        "True True True",
        *(version, version, "torch_ucc", version, version),
        "no mpi",
        "in the list: False",
        "finders: 1 True",
    ]


SEARCHES = """
import importlib.util
import torch
assert importlib.util.find_spec("torch_ccl") is None
import oneccl_bindings_for_pytorch
"""


def test_a_wrong_value_is_named_once_by_the_search_for_a_module() -> None:
    finished = run_code(SEARCHES, HBMCOMM_INSTEAD_OF="cll")
    assert finished.code != 0
    wrong = "warn: no module torch_ccl: HBMCOMM_INSTEAD_OF=cll: hbm cannot take"
    assert wrong in finished.output, finished.output
    assert finished.output.count("warn: no module") == 1, finished.output
    assert "ModuleNotFoundError: No module named 'oneccl_bindings_for_pytorch'" in finished.output


def test_torch_ccls_class_makes_a_backend_of_hbm() -> None:
    assert lines(CCL, HBMCOMM_INSTEAD_OF="ccl") == [
        "ProcessGroupHbm ccl 1 [1.0, 1.0, 1.0, 1.0]",
        "True",
    ]


def test_the_class_of_ucc_makes_a_backend_of_hbm() -> None:
    assert lines(UCC, HBMCOMM_INSTEAD_OF="ucc") == ["ProcessGroupHbm ucc 1 [1.0, 1.0, 1.0, 1.0]"]


@pytest.mark.parametrize(
    ("module", "place", "has_metadata"),
    [("oneccl_bindings_for_pytorch", 1, True), ("torch_ccl", 2, False), ("torch_ucc", 3, True)],
)
def test_an_installed_module_stays(
    tmp_path: Path, module: str, place: int, has_metadata: bool
) -> None:
    (tmp_path / f"{module}.py").write_text('__version__ = "its own"')
    if has_metadata:
        metadata = tmp_path / "oneccl_bind_pt-1.13.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: oneccl_bind_pt\nVersion: 1.13.0\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{FOUND}"
    found = lines_of(run_code(code, HBMCOMM_INSTEAD_OF="ccl,ucc"))
    assert found[place] == "its own"
    expected = ["1.13.0"] * 2 if has_metadata else ["no oneccl_bind_pt", "no oneccl-bind-pt"]
    assert found[4:6] == expected
