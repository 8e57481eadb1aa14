"""Prints the directory of MPICH's mpi.h, which the native tests and benchmarks include."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path


def mpi_include() -> Path:
    """Return the directory of MPICH's mpi.h. HBMCOMM_MPI_INCLUDE, when set, is the only candidate.

    Raises FileNotFoundError if no candidate has it.
    """
    chosen = os.environ.get("HBMCOMM_MPI_INCLUDE")
    candidates = [Path(chosen)] if chosen else [*_from_wheel(), *_from_mpicc(), *_from_debian()]
    for directory in candidates:
        if _is_mpich(directory / "mpi.h"):
            return directory
    if chosen:
        raise FileNotFoundError(
            f"HBMCOMM_MPI_INCLUDE={chosen} has no mpi.h of MPICH: set it to the directory of that "
            "file, or unset it to use the mpich package from PyPI"
        )
    raise FileNotFoundError(
        "The native tests need MPICH's mpi.h, which was not found: run `pip install mpich`, or "
        "`apt-get install libmpich-dev`, or set HBMCOMM_MPI_INCLUDE to its directory"
    )


def _is_mpich(header: Path) -> bool:
    return header.is_file() and "MPICH_NUMVERSION" in header.read_text(errors="replace")


def _from_wheel() -> list[Path]:
    try:
        listed = files("mpich") or []
    except PackageNotFoundError:
        return []
    return [Path(str(item.locate())).resolve().parent for item in listed if item.name == "mpi.h"]


def _from_mpicc() -> list[Path]:
    if shutil.which("mpicc") is None:
        return []
    shown = subprocess.run(["mpicc", "-show"], text=True, capture_output=True).stdout
    return [Path(word[2:]) for word in shlex.split(shown) if word.startswith("-I")]


def _from_debian() -> list[Path]:
    triplet = sysconfig.get_config_var("MULTIARCH")
    return [Path("/usr/include") / triplet / "mpich"] if triplet else []


if __name__ == "__main__":
    try:
        print(mpi_include())
    except FileNotFoundError as error:
        sys.exit(str(error))
