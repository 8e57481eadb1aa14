"""Launchers beyond torchrun and plain mpiexec: mpi:// in full, Slurm, containers, another MPICH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness import beyond_gloo
from harness.jobs import BIN, JOB_SCRIPT, Finished, Job, mpiexec, run, torchrun
from test_bootstrap import assert_done, free_port

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

OVER_MPI = ("--init-method", "mpi://")

# mpiexec, for code in place of the job script.
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

MPI4PY_AFTER = """
import torch.distributed as dist
dist.init_process_group("hbm", init_method="mpi://")
from mpi4py import MPI
assert MPI.COMM_WORLD.Get_rank() == dist.get_rank()
assert MPI.COMM_WORLD.allreduce(1) == dist.get_world_size()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} done")
"""


def mpiexec_code(ranks: int, code: str) -> list[str | Path]:
    return [BIN / "mpiexec", "-n", str(ranks), sys.executable, "-c", code]


# mpi:// under mpiexec.


@pytest.mark.ranks(1, 2, 4)
def test_three_groups_in_one_process(ranks: int) -> None:
    assert_done(run(mpiexec_code(ranks, THREE_GROUPS)), ranks)


@pytest.mark.ranks(2)
def test_three_groups_on_a_port_of_choice(ranks: int) -> None:
    assert_done(run(mpiexec_code(ranks, THREE_GROUPS), MASTER_PORT=str(free_port())), ranks)


@pytest.mark.ranks(2)
def test_mpi4py_imported_after(ranks: int) -> None:
    assert_done(run(mpiexec_code(ranks, MPI4PY_AFTER)), ranks)


@pytest.mark.ranks(2)
def test_exit_without_destroying_over_mpi(ranks: int) -> None:
    assert_done(run(mpiexec(ranks, *OVER_MPI, "--keep")), ranks)


@pytest.mark.ranks(2)
def test_port_that_cannot_be_had(ranks: int) -> None:
    """Rank 0 fails before there is a store; the others hear of it and do not hang."""
    finished = run(mpiexec(ranks, *OVER_MPI), limit=60, MASTER_PORT="none")
    assert finished.code != 0
    assert "MASTER_PORT=none" in finished.output, finished.output


@pytest.mark.ranks(2)
def test_rank_is_not_to_be_given(ranks: int) -> None:
    code = """
import torch.distributed as dist
dist.init_process_group("hbm", init_method="mpi://", rank=0, world_size=2)
"""
    finished = run(mpiexec_code(ranks, code), limit=60)
    assert finished.code != 0
    assert "the launcher knows them" in finished.output, finished.output


@pytest.mark.ranks(2)
def test_mpi_url_under_torchrun(ranks: int) -> None:
    """torchrun says nothing to MPI: each rank would be a job of its own, and is told so."""
    finished = run(torchrun(ranks, *OVER_MPI), limit=60)
    assert finished.code != 0
    assert "WORLD_SIZE=2 processes were started" in finished.output, finished.output


@pytest.mark.ranks(2)
def test_environment_under_mpiexec(ranks: int) -> None:
    """env:// works there too: hbm then forms MPI itself and hides mpiexec's PMI from it."""
    shell = f'RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE exec "{sys.executable}" "{JOB_SCRIPT}"'
    command = [BIN / "mpiexec", "-n", str(ranks), "sh", "-c", shell]
    assert_done(run(command, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())), ranks)


# Slurm.

ONE_MACHINE = Path(__file__).parent / "slurm" / "one_machine.sh"

with_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))),
    reason="needs root, slurm-wlm and munge",
)


def srun(*arguments: str | Path, **extra: str) -> Finished:
    return run([ONE_MACHINE, "srun", *arguments], **extra)


@with_slurm
def test_srun() -> None:
    job = (sys.executable, JOB_SCRIPT, *OVER_MPI)
    assert_done(srun("--nodes=2", "--ntasks=4", "--mpi=pmi2", *job), 4)


@with_slurm
def test_srun_ends_a_job_whose_rank_fails() -> None:
    job = (sys.executable, JOB_SCRIPT, *OVER_MPI, "--fail-rank", "1")
    finished = srun("--ntasks=2", "--mpi=pmi2", "--kill-on-bad-exit=1", *job)
    assert finished.code not in (0, 70), finished.output
    assert "this rank was told to fail" in finished.output, finished.output


@with_slurm
def test_srun_without_pmi2() -> None:
    finished = srun("--ntasks=2", "--mpi=none", sys.executable, JOB_SCRIPT, *OVER_MPI)
    assert finished.code != 0
    assert "srun --mpi=pmi2" in finished.output, finished.output


@with_slurm
def test_srun_with_its_own_variables() -> None:
    names = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
    shell = f'{names} exec "{sys.executable}" "{JOB_SCRIPT}"'
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert_done(srun("--nodes=2", "--ntasks=4", "sh", "-c", shell, **where), 4)


@with_slurm
def test_srun_starts_torchrun_on_each_node() -> None:
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}")
    torchrun_there = (BIN / "torchrun", "--nnodes=2", "--nproc-per-node=2", *rendezvous)
    assert_done(srun("--nodes=2", "--ntasks-per-node=1", *torchrun_there, JOB_SCRIPT), 4)


# Containers: namespaces of the kernel, as container runtimes make them. The network is shared.

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
    """Neither memory nor process ids may be taken as shared only because the kernel is."""
    port = free_port()
    shell = f'{prepare}mount -t proc proc /proc && exec "$@"'
    with ExitStack() as stack:
        jobs = []
        for rank in range(2):
            command = [*NAMESPACES, "sh", "-c", shell, "sh", sys.executable, JOB_SCRIPT]
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            job = Job(command, RANK=str(rank), WORLD_SIZE="2", **where)
            jobs.append(stack.enter_context(job))
        finished = [job.finish() for job in jobs]
    assert_done(Finished(max(f.code for f in finished), "".join(f.output for f in finished)), 2)


# The distribution's MPICH in place of the wheel's.

DEBIAN_MPICH = next(iter(Path("/usr/lib").glob("*/libmpich.so.12")), None)

with_debian_mpich = pytest.mark.skipif(DEBIAN_MPICH is None, reason="needs libmpich12")


@with_debian_mpich
@pytest.mark.ranks(2)
@pytest.mark.parametrize("launch", [torchrun, mpiexec])
def test_debian_mpich(ranks: int, launch: object) -> None:
    assert callable(launch)
    method = OVER_MPI if launch is mpiexec else ()
    assert_done(run(launch(ranks, *method), HBMCOMM_MPI_LIB=str(DEBIAN_MPICH)), ranks)


@with_debian_mpich
@pytest.mark.ranks(2)
def test_two_mpi_libraries(ranks: int) -> None:
    """mpi4py has loaded the wheel's MPICH, and HBMCOMM_MPI_LIB names another."""
    command = mpiexec(ranks, *OVER_MPI, "--mpi4py-first")
    finished = run(command, limit=60, HBMCOMM_MPI_LIB=str(DEBIAN_MPICH))
    assert finished.code != 0
    assert "one MPI library" in finished.output, finished.output
