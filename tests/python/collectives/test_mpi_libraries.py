"""MPI libraries other than the wheel's libmpi.so.12.

They are a library with MPI 5's standard ABI, Debian's, Intel's, and Open MPI, which hbm refuses.
PyPI's libraries are installed under build/mpi, once. A test skips if its library cannot be
installed.
"""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.deaths import Fate
from harness.deaths import Job as Deaths
from harness.jobs import (
    BIN,
    JOB_SCRIPT,
    Finished,
    assert_done,
    by_hand,
    mpiexec,
    run,
)
from harness.network import free_port

pytestmark = [beyond_gloo, pytest.mark.full, pytest.mark.usefixtures("nothing_left")]

BUILD = Path(__file__).resolve().parents[3] / "build"
OVER_MPI = ("--init-method", "mpi://")


@dataclass(frozen=True)
class Mpi:
    library: Path
    mpiexec: Path
    version: str  # as in the log


@cache
def install(requirement: str) -> Path:
    """Install a package of PyPI, once, and return its folder. Skip the test if this fails."""
    folder = BUILD / "mpi" / requirement
    folder.mkdir(parents=True, exist_ok=True)
    complete = folder / "complete"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed"]
            command += ["--no-warn-script-location", "--prefix", str(folder), requirement]
            finished = subprocess.run(command, capture_output=True, text=True)
            if finished.returncode != 0:
                pytest.skip(f"pip cannot install {requirement}: {finished.stderr.splitlines()[-1]}")
            complete.touch()
    return folder


def standard() -> Mpi:
    library = BIN.parent / "lib" / "libmpi_abi.so.1"
    if not library.exists():
        pytest.skip("needs PyPI's mpich 5")
    return Mpi(library, BIN / "mpiexec", "MPICH Version:      5.")


def debian() -> Mpi:
    library = next(iter(Path("/usr/lib").glob("*/libmpich.so.12")), None)
    if library is None:
        pytest.skip("needs Debian's mpich")
    return Mpi(library, BIN / "mpiexec", "MPICH Version: 4.")  # of the wheel; it also speaks PMI-1


def intel() -> Mpi:
    folder = install("impi-rt")
    return Mpi(folder / "lib/libmpi.so.12", folder / "bin/mpiexec", "Intel(R) MPI Library")


def intel_standard() -> Mpi:
    folder = install("impi-rt")
    return Mpi(folder / "lib/libmpi_abi.so.1", folder / "bin/mpiexec", "Intel(R) MPI Library")


@pytest.fixture(params=[standard, debian, intel, intel_standard], ids=lambda mpi: mpi.__name__)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    found: Mpi = request.param()
    return found


def assert_used(finished: Finished, mpi: Mpi) -> None:
    assert_done(finished, 2)
    line = f", {mpi.library}\n"
    assert finished.output.count(line) == finished.output.count(mpi.version) == 2, finished.output


def test_without_mpiexec(mpi: Mpi) -> None:
    named = str(mpi.library)
    finished = run(by_hand(2), HBMCOMM_MPI_LIB=named, HBMCOMM_NODE="mpi", HBMCOMM_LOG="info")
    assert_used(finished, mpi)


def test_under_mpiexec(mpi: Mpi) -> None:
    command = [str(mpi.mpiexec), "-n", "2", sys.executable, str(JOB_SCRIPT), *OVER_MPI]
    assert_used(run(command, HBMCOMM_MPI_LIB=str(mpi.library), HBMCOMM_LOG="info"), mpi)


def all_reduce(count: int, rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(count))


@pytest.mark.parametrize("count", [100, 200_000])
def test_a_killed_rank_is_named(mpi: Mpi, count: int) -> None:
    """The error names the dead rank, whether MPI waits for it or reports an unsent message."""
    surroundings = {"HBMCOMM_NODE": "mpi", "HBMCOMM_MPI_LIB": str(mpi.library)}
    job = Deaths(3, environment=surroundings)
    for survivor in job.run(partial(all_reduce, count), Fate(victim=2)):
        assert re.search(rf"allreduce #\d+ .* of {count} float32", survivor.text), survivor
        assert re.search(r"rank 2 \(pid \d+ on \S+\) has died", survivor.text), survivor


def test_two_libraries_in_one_process() -> None:
    """An error tells of two libraries: mpi4py's libmpi.so.12, and the one in HBMCOMM_MPI_LIB."""
    command = mpiexec(2, *OVER_MPI, "--mpi4py-first")
    finished = run(command, HBMCOMM_MPI_LIB=str(standard().library))
    assert finished.code != 0
    assert "one MPI library" in finished.output, finished.output


# Open MPI.


@pytest.fixture(params=["4.1.8", "5.0.11"])
def open_mpi(request: pytest.FixtureRequest) -> Mpi:
    folder = install(f"openmpi=={request.param}")
    library = folder / "lib" / "libmpi.so.40"
    return Mpi(library, folder / "bin" / "mpiexec", f"Open MPI v{request.param}")


def start_by(mpi: Mpi, *command: str | Path) -> list[str | Path]:
    return [mpi.mpiexec, "--allow-run-as-root", "--oversubscribe", "-n", "2", *command]


def assert_refused(finished: Finished, mpi: Mpi) -> None:
    refusal = f"{mpi.library} is {mpi.version}, with an ABI of Open MPI's own"
    assert finished.output.count(refusal) >= 2, finished.output
    assert "Open MPI has from version 6 on" in finished.output


def test_open_mpi_without_mpiexec(open_mpi: Mpi) -> None:
    finished = run(by_hand(2), HBMCOMM_MPI_LIB=str(open_mpi.library), HBMCOMM_NODE="mpi")
    assert finished.code != 0
    assert_refused(finished, open_mpi)


def test_open_mpi_under_its_mpiexec(open_mpi: Mpi) -> None:
    # Each rank runs in a shell that ends normally. Otherwise mpiexec would end the other rank.
    script = '"$@"; echo "ended with $?"'
    command = start_by(open_mpi, "sh", "-c", script, "sh", sys.executable, JOB_SCRIPT, *OVER_MPI)
    finished = run(command, HBMCOMM_MPI_LIB=str(open_mpi.library))
    assert finished.output.count("ended with 1") == 2, finished.output
    assert_refused(finished, open_mpi)


def test_mpich_under_open_mpis_mpiexec(open_mpi: Mpi) -> None:
    finished = run(start_by(open_mpi, sys.executable, JOB_SCRIPT, *OVER_MPI))
    assert finished.code != 0
    assert "speaks PMIx, and " in finished.output, finished.output


def test_environment_under_open_mpis_mpiexec(open_mpi: Mpi) -> None:
    """env:// works under Open MPI's mpiexec: hbm makes the job itself, over the wheel's MPICH."""
    names = "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"
    command = start_by(open_mpi, "sh", "-c", f'{names} exec "{sys.executable}" "{JOB_SCRIPT}"')
    port = str(free_port())
    finished = run(command, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, HBMCOMM_NODE="mpi")
    assert_done(finished, 2)
