"""The requirements of the C++ build on the machine, checked before the compiler runs.

`missing()` says in one line what is not there and how to install it. `mpi_include()` is the
directory of MPICH's mpi.h; as a script, this file prints it. MPI is loaded at run time, so no MPI
library is linked. A build without PyTorch needs no mpi.h.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple


class Requirement(NamedTuple):
    package: str  # as Debian and Ubuntu name it
    header: str
    library: str | None = None


REQUIREMENTS = [
    Requirement("python3-dev", "Python.h"),
    Requirement("libmemkind-dev", "memkind.h", "memkind"),
    Requirement("libnuma-dev", "numa.h", "numa"),
    Requirement("libhwloc-dev", "hwloc.h", "hwloc"),
    Requirement("libssl-dev", "openssl/hmac.h", "crypto"),
    Requirement("libibverbs-dev", "infiniband/verbs.h", "ibverbs"),
    Requirement("librdmacm-dev", "rdma/rdma_cma.h", "rdmacm"),
]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def missing(*, without_torch: bool = False) -> str | None:
    """One line that names what the build lacks and the command that installs it."""
    if shutil.which(compiler()[0]) is None:
        return _advice([f"the compiler {compiler()[0]}"], ["g++"])
    lacking = [need for need in REQUIREMENTS if not _links(need)]
    names = [f"lib{need.library}" if need.library else need.header for need in lacking]
    packages = [need.package for need in lacking]
    try:
        if not without_torch:
            mpi_include()
    except FileNotFoundError as error:
        if not lacking:
            return str(error)
        names.append("mpi.h")
        packages.append("libmpich-dev")
    return _advice(names, packages) if lacking else None


def mpi_include() -> Path:
    """The directory of MPICH's mpi.h. HBMCOMM_MPI_INCLUDE, when set, is the only candidate."""
    chosen = os.environ.get("HBMCOMM_MPI_INCLUDE")
    candidates = [Path(chosen)] if chosen else [*_from_wheel(), *_from_mpicc(), *_from_debian()]
    for directory in candidates:
        if _is_mpich(directory / "mpi.h"):
            return directory
    if chosen:
        raise FileNotFoundError(
            f"HBMCOMM_MPI_INCLUDE={chosen} has no mpi.h of MPICH's: name the directory that has "
            "it, or unset the variable to use the mpich package from PyPI"
        )
    raise FileNotFoundError(
        "The build needs MPICH's mpi.h, which is not here: run `pip install mpich`, or "
        "`apt-get install libmpich-dev`, or set HBMCOMM_MPI_INCLUDE to its directory"
    )


def _advice(names: list[str], packages: list[str]) -> str:
    return (
        f"The build needs {', '.join(names)}, which this machine lacks: "
        f"run `apt-get install {' '.join(packages)}` as root (or your system's equivalent)"
    )


def _links(need: Requirement) -> bool:
    library = [f"-l{need.library}"] if need.library else []
    python = ["-I", sysconfig.get_path("include"), "-I", sysconfig.get_path("platinclude")]
    command = [*compiler(), *python, "-x", "c++", "-", "-shared", "-fPIC", "-o", os.devnull]
    probe = subprocess.run(
        [*command, *library], input=f"#include <{need.header}>\n", text=True, capture_output=True
    )
    return probe.returncode == 0


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
