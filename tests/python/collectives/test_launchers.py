"""mpi:// under mpiexec, Slurm, and containers, and memory.bind() under mpiexec and Slurm.

test_bootstrap.py tests other launchers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest
from harness import beyond_gloo
from harness.jobs import BIN, JOB_SCRIPT, Finished, Job, assert_done, mpiexec, run, torchrun
from harness.network import free_port

pytestmark = [beyond_gloo, pytest.mark.full, pytest.mark.usefixtures("nothing_left")]

OVER_MPI = ("--init-method", "mpi://")

# Programs that mpiexec runs in place of the job script.
THREE_GROUPS = """
import torch, torch.distributed as dist
for attempt in range(3):
    dist.init_process_group("hbm", init_method="mpi://")
    rank, size = dist.get_rank(), dist.get_world_size()
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    assert (ones == size).all()
    dist.destroy_process_group()
print(f"rank {rank} of {size} done")
"""

LATE_RANK = """
import datetime, os, time
import torch.distributed as dist
late = os.environ["TOO_LATE"]  # a file's name
if os.environ["PMI_RANK"] == "1":
    while not os.path.exists(late):
        time.sleep(0.1)
    os._exit(0)
try:
    dist.init_process_group("hbm", init_method="mpi://", timeout=datetime.timedelta(seconds=1))
except RuntimeError as error:
    print(error, flush=True)
    # MPI never came to the point at which they could be unlinked.
    names = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps")}
    for name in filter(os.path.exists, names):
        if name.startswith("/dev/shm/"):
            os.unlink(name)
    open(late, "w").close()
    os._exit(3)
"""

MPI4PY_AFTER = """
import torch.distributed as dist
dist.init_process_group("hbm", init_method="mpi://")
from mpi4py import MPI
assert MPI.COMM_WORLD.Get_rank() == dist.get_rank()
assert MPI.COMM_WORLD.allreduce(1) == dist.get_world_size()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} done")
"""

BIND = """
import os
from torch_hbmcomm import memory
from torch_hbmcomm.local_rank import local_rank_and_size
rank, size = local_rank_and_size(None, None, os.environ)
memory.bind("numa")
print(f"local rank {rank} of {size}")
"""


def mpiexec_code(ranks: int, code: str) -> list[str | Path]:
    return [BIN / "mpiexec", "-n", str(ranks), sys.executable, "-c", code]


# mpi:// under mpiexec.


@pytest.mark.ranks(1, 4)
def test_three_groups_in_one_process(ranks: int) -> None:
    assert_done(run(mpiexec_code(ranks, THREE_GROUPS)), ranks)


@pytest.mark.ranks(2)
def test_three_groups_on_a_port_of_choice(ranks: int) -> None:
    assert_done(run(mpiexec_code(ranks, THREE_GROUPS), MASTER_PORT=str(free_port())), ranks)


@pytest.mark.ranks(2)
def test_mpi4py_imported_after(ranks: int) -> None:
    assert_done(run(mpiexec_code(ranks, MPI4PY_AFTER)), ranks)


@pytest.mark.ranks(2, 4)
def test_bind_under_mpiexec(ranks: int) -> None:
    finished = run(mpiexec_code(ranks, BIND))
    assert finished.code == 0, finished.output
    for rank in range(ranks):
        assert finished.output.count(f"local rank {rank} of {ranks}") == 1, finished.output


@pytest.mark.ranks(2)
def test_exit_without_destroying_over_mpi(ranks: int) -> None:
    assert_done(run(mpiexec(ranks, *OVER_MPI, "--keep")), ranks)


@pytest.mark.ranks(2)
def test_rank_that_never_comes(ranks: int, tmp_path: Path) -> None:
    """The launcher has started rank 1, which never joins, so MPI waits for it until the timeout."""
    finished = run(mpiexec_code(ranks, LATE_RANK), TOO_LATE=str(tmp_path / "late"))
    assert finished.code == 3
    assert "not every rank that the launcher started came" in finished.output, finished.output


@pytest.mark.ranks(2)
def test_port_that_cannot_be_had(ranks: int) -> None:
    """Rank 0 fails before it serves a store. The other ranks are notified, and do not hang."""
    finished = run(mpiexec(ranks, *OVER_MPI), MASTER_PORT="none")
    assert finished.code != 0
    assert "MASTER_PORT=none" in finished.output, finished.output


@pytest.mark.ranks(2)
def test_rank_is_not_to_be_given(ranks: int) -> None:
    code = """
import torch.distributed as dist
dist.init_process_group("hbm", init_method="mpi://", rank=0, world_size=2)
"""
    finished = run(mpiexec_code(ranks, code))
    assert finished.code != 0
    assert "the launcher sets them" in finished.output, finished.output


@pytest.mark.ranks(2)
def test_mpi_url_under_torchrun(ranks: int) -> None:
    """torchrun does not use PMI: each rank would be a job of its own, and the error says so."""
    finished = run(torchrun(ranks, *OVER_MPI))
    assert finished.code != 0
    assert "WORLD_SIZE=2 processes were started" in finished.output, finished.output


@pytest.mark.ranks(2)
def test_environment_under_mpiexec(ranks: int) -> None:
    """env:// works under mpiexec too: hbm itself makes the MPI job, and hides mpiexec's PMI."""
    shell = f'RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE exec "{sys.executable}" "{JOB_SCRIPT}"'
    command: list[str | Path] = [BIN / "mpiexec", "-n", str(ranks), "sh", "-c", shell]
    assert_done(run(command, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())), ranks)


# Slurm.

ONE_MACHINE = Path(__file__).parent / "slurm" / "one_machine.sh"

with_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))),
    reason="needs root, slurm-wlm and munge",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start a cluster of two nodes. Yields the path of its configuration."""
    keeper = ["sh", "-c", 'echo "$SLURM_CONF"; exec cat']  # cat ends with its input
    ports = " ".join(str(free_port()) for _ in range(3))
    with subprocess.Popen(
        [ONE_MACHINE, *keeper],
        env=os.environ | {"HBMCOMM_TEST_SLURM_PORTS": ports},
        stdin=PIPE,
        stdout=PIPE,
        text=True,
    ) as running:
        assert running.stdin and running.stdout
        configuration = running.stdout.readline().strip()
        assert configuration, "one_machine.sh did not bring up a cluster"
        yield configuration
        running.stdin.close()
        assert running.wait(60) == 0


def srun(cluster: str, *arguments: str | Path, **extra: str) -> Finished:
    return run(["srun", *arguments], 400, SLURM_CONF=cluster, **extra)


@with_slurm
def test_srun(cluster: str) -> None:
    job = (sys.executable, JOB_SCRIPT, *OVER_MPI)
    assert_done(srun(cluster, "--nodes=2", "--ntasks=4", "--mpi=pmi2", *job), 4)


@with_slurm
def test_srun_of_a_program_that_says_mpi(cluster: str) -> None:
    says_mpi = {"HBMCOMM_INSTEAD_OF": "mpi", "HBMCOMM_TEST_BACKEND": "mpi"}
    job = ("--nodes=2", "--ntasks=4", "--mpi=pmi2", sys.executable, JOB_SCRIPT)
    assert_done(srun(cluster, *job, **says_mpi), 4)


@with_slurm
def test_srun_ends_a_job_whose_rank_fails(cluster: str) -> None:
    job = (sys.executable, JOB_SCRIPT, *OVER_MPI, "--fail-rank", "1")
    finished = srun(cluster, "--ntasks=2", "--mpi=pmi2", "--kill-on-bad-exit=1", *job)
    assert finished.code != 0
    assert "this rank fails as requested" in finished.output, finished.output


@with_slurm
def test_srun_without_pmi2(cluster: str) -> None:
    finished = srun(cluster, "--ntasks=2", "--mpi=none", sys.executable, JOB_SCRIPT, *OVER_MPI)
    assert finished.code != 0
    assert "srun --mpi=pmi2" in finished.output, finished.output


@with_slurm
def test_srun_with_its_own_variables(cluster: str) -> None:
    names = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
    place = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
    shell = f'{names} {place} exec "{sys.executable}" "{JOB_SCRIPT}"'
    assert_done(srun(cluster, "--nodes=2", "--ntasks=4", "sh", "-c", shell), 4)


@with_slurm
@pytest.mark.parametrize("pmi", ["pmi2", "none"])
def test_bind_under_srun(cluster: str, pmi: str) -> None:
    """Slurm places two tasks on the first node, and one task on the second."""
    job = ("--nodes=2", "--ntasks=3", f"--mpi={pmi}", sys.executable, "-c", BIND)
    finished = srun(cluster, *job)
    assert finished.code == 0, finished.output
    for place in ("0 of 2", "1 of 2", "0 of 1"):
        assert finished.output.count(f"local rank {place}") == 1, finished.output


@with_slurm
def test_srun_starts_torchrun_on_each_node(cluster: str) -> None:
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}")
    agent = (BIN / "torchrun", "--nnodes=2", "--nproc-per-node=2", *rendezvous, JOB_SCRIPT)
    assert_done(srun(cluster, "--nodes=2", "--ntasks-per-node=1", *agent), 4)


# Containers: the tests make kernel namespaces, as container runtimes do, with one shared network.

NAMESPACES = [
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--mount",
    "--uts",
    "--ipc",
]
OWN_SHM = "mount -t tmpfs tmpfs /dev/shm && "


def namespaces_work() -> bool:
    probe = subprocess.run([*NAMESPACES, "sh", "-c", OWN_SHM + "true"], capture_output=True)
    return probe.returncode == 0


@pytest.mark.skipif(not namespaces_work(), reason="namespaces are not permitted here")
@pytest.mark.parametrize("prepare", [OWN_SHM, ""], ids=["own /dev/shm", "shared /dev/shm"])
def test_containers(prepare: str) -> None:
    """hbm must not assume that containers on one kernel share memory or process ids."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shell = f'{prepare}mount -t proc proc /proc && exec "$@"'
    command = [*NAMESPACES, "sh", "-c", shell, "sh", sys.executable, str(JOB_SCRIPT)]
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(command, RANK=str(rank), **where)) for rank in range(2)]
        finished = [job.finish() for job in jobs]
    assert_done(Finished(max(f.code for f in finished), "".join(f.output for f in finished)), 2)


@pytest.mark.skipif(not namespaces_work(), reason="namespaces are not permitted here")
@pytest.mark.parametrize("command", [torchrun(2), mpiexec(2, "--init-method=mpi://")])
def test_a_small_shm_is_an_error_and_no_signal(command: list[str | Path]) -> None:
    shell = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && mount -t proc proc /proc && exec "$@"'
    finished = run([*NAMESPACES, "sh", "-c", shell, "sh", *command], HBMCOMM_NODE="mpi")
    assert finished.code != 0
    assert "/dev/shm has 64 KiB left, and MPI needs" in finished.output, finished.output
    for signal_name in ("SIGBUS (", "Signal 7", "Bus error", "BAD TERMINATION"):
        assert signal_name not in finished.output, finished.output
