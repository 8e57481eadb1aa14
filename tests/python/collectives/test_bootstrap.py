"""The start of groups: every rendezvous and launcher, re-initialisation, failure at the start.

Also the modules and libraries that `import torch` loads once the package is installed.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Context, Pool, beyond_gloo
from harness.jobs import (
    BIN,
    JOB_SCRIPT,
    Finished,
    Job,
    assert_done,
    mpiexec,
    run,
    run_code,
    torchrun,
)
from harness.network import free_port
from torch._C._distributed_c10d import DebugLevel, HashStore, TCPStore, set_debug_level

pytestmark = pytest.mark.usefixtures("nothing_left")


def form_and_use(context: Context, timeout: float = 60, **where: Any) -> None:
    """Form the default group, reduce a tensor with it, and destroy it."""
    where.setdefault("backend", BACKEND)
    dist.init_process_group(timeout=timedelta(seconds=timeout), **where)
    data = torch.full((1000,), context.rank + 1.0)
    dist.all_reduce(data)
    assert (data == context.size * (context.size + 1) / 2).all(), data
    dist.destroy_process_group()


# Rendezvous.


def by_environment(context: Context, port: int) -> None:
    os.environ.update(
        RANK=str(context.rank),
        WORLD_SIZE=str(context.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    form_and_use(context)


@pytest.mark.ranks(1, 2, 4)
def test_environment(bare_pool: Pool) -> None:
    bare_pool.run(by_environment, free_port())


def by_url(context: Context, url: str, **more: Any) -> None:
    form_and_use(context, init_method=url, rank=context.rank, world_size=context.size, **more)


@pytest.mark.ranks(2, 4)
def test_tcp(bare_pool: Pool) -> None:
    bare_pool.run(by_url, f"tcp://127.0.0.1:{free_port()}")


@pytest.mark.ranks(2, 4)
def test_file(bare_pool: Pool, tmp_path: Path) -> None:
    bare_pool.run(by_url, f"file://{tmp_path}/store")


def keys_of_groups(context: Context, port: int) -> tuple[int, int]:
    """Return the number of hbm's keys in the store after a first group, and after a second.

    Leaves out the keys that ranks set only if a step takes long.
    """
    store = TCPStore("127.0.0.1", port, context.size, is_master=context.rank == 0)

    def use_and_count(group: dist.ProcessGroup | None) -> int:
        dist.all_reduce(torch.ones(1), group=group)
        late = re.compile(r"/(calls|mapped)/\d+$")
        count = sum("hbm/" in key and not late.search(key) for key in store.list_keys())
        dist.barrier()
        return count

    dist.init_process_group("hbm", store=store, rank=context.rank, world_size=context.size)
    counts = use_and_count(None), use_and_count(dist.new_group())
    dist.destroy_process_group()
    return counts


@beyond_gloo
@pytest.mark.ranks(2, 8)
def test_few_keys(bare_pool: Pool) -> None:
    """Count the keys: at most size + 4 for a first group, and 2 * size + 4 for a further group."""
    for first, second in bare_pool.run(keys_of_groups, free_port()):
        assert first <= bare_pool.size + 4
        assert second - first <= 2 * bare_pool.size + 4


def by_hash_store(context: Context) -> None:
    form_and_use(context, store=HashStore(), rank=0, world_size=1)


@pytest.mark.ranks(1)
def test_one_rank_over_a_hash_store(bare_pool: Pool) -> None:
    bare_pool.run(by_hash_store)


def named_by_device(context: Context, url: str) -> None:
    by_url(context, url, backend=f"cpu:{BACKEND}")


@pytest.mark.ranks(2)
def test_named_by_device(bare_pool: Pool, tmp_path: Path) -> None:
    bare_pool.run(named_by_device, f"file://{tmp_path}/store")


def in_debug_detail(context: Context, url: str) -> None:
    set_debug_level(DebugLevel.DETAIL)
    by_url(context, url)


@pytest.mark.ranks(2)
def test_debug_detail(bare_pool: Pool, tmp_path: Path) -> None:
    bare_pool.run(in_debug_detail, f"file://{tmp_path}/store")


def three_times(context: Context, url: str) -> None:
    for attempt in range(3):
        by_url(context, url + str(attempt))


@pytest.mark.ranks(1, 2, 4)
def test_three_times_in_one_process(bare_pool: Pool, tmp_path: Path) -> None:
    bare_pool.run(three_times, f"file://{tmp_path}/store")
    assert not any(bare_pool.close())


def three_times_as_nodes(context: Context, url: str) -> None:
    os.environ["HBMCOMM_NODE_ID"] = f"node{context.rank}"
    three_times(context, url)


@pytest.mark.ranks(2, 4)
def test_three_times_with_a_node_for_each_rank(bare_pool: Pool, tmp_path: Path) -> None:
    bare_pool.run(three_times_as_nodes, f"file://{tmp_path}/store")
    assert not any(bare_pool.close())


def without_rank_1(context: Context, url: str) -> str:
    if context.rank == 1:
        return ""
    try:
        by_url(context, url, timeout=3)
    except Exception as error:
        return str(error)
    raise AssertionError("no error although a rank never came")


@pytest.mark.ranks(3)
def test_world_that_is_never_complete(bare_pool: Pool, tmp_path: Path) -> None:
    """Rank 1 never comes. After the timeout, the errors of the other ranks name rank 1."""
    first, _, third = bare_pool.run(without_rank_1, f"file://{tmp_path}/store", limit=30)
    if BACKEND != "gloo":
        for message in (first, third):
            assert re.search(r"(?i)ranks?\b[^.;]*\b1\b", message), message


# Launchers.


@pytest.mark.full
@pytest.mark.ranks(4)
def test_two_agents_make_two_nodes(ranks: int) -> None:
    """With two torchrun agents, HBMCOMM_NODE_ID makes each agent's ranks a node."""
    port = free_port()
    with ExitStack() as stack:
        jobs = []
        for node in range(2):
            command: list[str | Path] = [
                BIN / "torchrun",
                "--nnodes=2",
                f"--nproc-per-node={ranks // 2}",
                f"--node-rank={node}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                JOB_SCRIPT,
            ]
            jobs.append(stack.enter_context(Job(command, HBMCOMM_NODE_ID=f"node{node}")))
        finished = [job.finish() for job in jobs]
    assert_done(Finished(max(f.code for f in finished), "".join(f.output for f in finished)), ranks)


@beyond_gloo
@pytest.mark.ranks(2)
def test_mpiexec(ranks: int) -> None:
    assert_done(run(mpiexec(ranks, "--init-method", "mpi://")), ranks)


@pytest.mark.full
@beyond_gloo
@pytest.mark.ranks(2)
def test_mpi4py_imported_first_under_mpiexec(ranks: int) -> None:
    """The group joins the MPI world that mpi4py has initialised."""
    assert_done(run(mpiexec(ranks, "--init-method", "mpi://", "--mpi4py-first")), ranks)


@pytest.mark.full
@beyond_gloo
@pytest.mark.ranks(2)
def test_mpi4py_imported_first_under_torchrun(ranks: int) -> None:
    """mpi4py has made MPI worlds of one process, which stay. The group uses TCP links."""
    assert_done(run(torchrun(ranks, "--mpi4py-first"), HBMCOMM_NODE="mpi"), ranks)


# The end of a job.


@pytest.mark.ranks(2)
def test_exit_without_destroying(ranks: int) -> None:
    assert_done(run(torchrun(ranks, "--keep")), ranks)


@pytest.mark.ranks(2)
def test_exception_in_one_rank_ends_the_job(ranks: int) -> None:
    finished = run(torchrun(ranks, "--fail-rank", "1"))
    assert finished.code != 0
    assert "this rank fails as requested" in finished.output


@pytest.mark.full
@beyond_gloo
@pytest.mark.ranks(2)
def test_exception_in_one_rank_under_mpiexec(ranks: int) -> None:
    finished = run(mpiexec(ranks, "--init-method", "mpi://", "--fail-rank", "1"))
    assert finished.code != 0
    assert "this rank fails as requested" in finished.output


# The cost of being installed.


@beyond_gloo
def test_import_torch_loads_neither_the_module_nor_mpi() -> None:
    finished = run_code("""
import sys, torch
assert "torch_hbmcomm._C" not in sys.modules
maps = open("/proc/self/maps").read()
assert "libmpi" not in maps, "libmpi is loaded"
assert "torch_hbmcomm/torch_" not in maps
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, HashStore, set_debug_level
assert dist.is_backend_available("hbm")
""")
    assert finished.code == 0, finished.output


@pytest.mark.full
@beyond_gloo
def test_import_torch_loads_only_small_modules_besides() -> None:
    """`import torch` loads modules of hbm, which add no library, thread or other package."""
    finished = run_code(
        """
import os, sys, threading
import torch
def libraries():
    return {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
def started():
    return len(os.listdir("/proc/self/task")), threading.active_count()
modules, mapped, threads = set(sys.modules), libraries(), started()
from torch_hbmcomm import _autoload
_autoload.register()
import torch.distributed as dist
assert dist.is_backend_available("hbm")
packages = {name.partition(".")[0] for name in set(sys.modules) - modules}
assert packages - set(sys.stdlib_module_names) == {"torch_hbmcomm"}, packages
assert libraries() == mapped, libraries() - mapped
assert started() == threads, threads
""",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert finished.code == 0, finished.output


@beyond_gloo
@pytest.mark.parametrize(
    "order",
    [
        "torch, torch_hbmcomm",
        "torch_hbmcomm, torch",
        pytest.param(
            "torch",
            marks=pytest.mark.skipif(
                not hasattr(dist.Backend, "_ensure_backend_registered"),
                reason="PyTorch looks names up among the entry points from 2.14 on",
            ),
        ),
    ],
)
def test_the_import_registers_where_pytorch_does_not(order: str) -> None:
    finished = run_code(
        f"import sys, {order}\n"
        "import torch.distributed as dist\n"
        "from torch._C._distributed_c10d import HashStore\n"
        "assert 'torch_hbmcomm._C' not in sys.modules\n"
        "dist.init_process_group('hbm', rank=0, world_size=1, store=HashStore())\n"
        "dist.destroy_process_group()\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert finished.code == 0, finished.output
    assert "Traceback" not in finished.output


@beyond_gloo
def test_the_memory_box_needs_no_pytorch() -> None:
    finished = run_code(
        "import sys\nfrom torch_hbmcomm import smb\nassert 'torch' not in sys.modules\n"
    )
    assert finished.code == 0, finished.output
