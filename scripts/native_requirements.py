"""Checks, before the build starts, that the machine has the libraries and compiler that it needs.

`missing()` returns one line that names the missing libraries and the command that installs them. No
build needs MPI, because MPI is loaded at run time.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple


class Requirement(NamedTuple):
    package: str  # name in Debian and Ubuntu
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


# Code that uses the C++ library, so that the linker keeps this library even with --as-needed.
_STREAM = "#include <fstream>\nbool read(std::ifstream& from, int& to) { return !!(from >> to); }\n"


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def missing() -> str | None:
    """Return one line that names the missing requirements and the remedy; None if all are here."""
    if shutil.which(compiler()[0]) is None:
        return _advice([f"the compiler {compiler()[0]}"], ["g++"])
    if unfit := _unfit_compiler():
        return unfit
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
    return _compile(f"#include <{need.header}>\n", os.devnull, [*python, *library]).returncode == 0


def _unfit_compiler() -> str | None:
    """Return the error's text if the compiler fails or links libstdc++ statically, else None."""
    named = f"`{shlex.join(compiler())}` (CXX, CXXFLAGS, LDFLAGS)"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        probe = _compile(_STREAM, str(library), [])
        if probe.returncode:
            said = next((line for line in probe.stderr.splitlines() if "error" in line), "")
            return f"The build needs a C++ compiler, and {named} fails: {said or probe.returncode}"
        if b"\0libstdc++.so." in library.read_bytes():  # the name of a needed library
            return None
    return (
        f"The build needs libstdc++ as a shared library, and {named} does not link it: PyTorch's "
        "libstdc++ and a second one crash in one process. Leave out -static-libstdc++, set CXX to "
        "another compiler, or install this one's libstdc++.so (Debian's package g++ has one)"
    )


def _compile(code: str, target: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    before, after = (shlex.split(os.environ.get(name, "")) for name in ("CXXFLAGS", "LDFLAGS"))
    library = ["-x", "c++", "-", "-shared", "-fPIC", "-o", target]
    return subprocess.run(
        [*compiler(), *before, *library, *after, *flags],
        input=code,
        env=os.environ | {"LC_ALL": "C"},
        text=True,
        capture_output=True,
    )
