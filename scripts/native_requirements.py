"""The requirements of the C++ build on the machine, checked before the compiler runs.

`missing()` says in one line what is not there and how to install it. MPI is loaded at run time, and
needed for no build.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
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


def missing() -> str | None:
    """One line that names what the build lacks and the command that installs it."""
    if shutil.which(compiler()[0]) is None:
        return _advice([f"the compiler {compiler()[0]}"], ["g++"])
    lacking = [need for need in REQUIREMENTS if not _links(need)]
    names = [f"lib{need.library}" if need.library else need.header for need in lacking]
    packages = [need.package for need in lacking]
    return _advice(names, packages) if lacking else None


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
