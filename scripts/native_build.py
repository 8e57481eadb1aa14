"""Builds the native parts of the package with CMake (csrc/CMakeLists.txt)."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cmake
import ninja
import pybind11

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "csrc"

LIBRARIES = ["libhbm_verbs", "libhbmsmb"]
LIBRARIES_OF_GROUPS = ["libhbm_memkind"]  # for the process group; the memory box needs none
HEADER = SOURCE / "smb.h"  # for C programs that link libhbmsmb


@contextmanager
def alone() -> Iterator[None]:
    """Waits until no other build uses this checkout's `build` directory, and keeps others waiting.

    CMake, Ninja and setuptools do not expect that another process writes to their directories.
    """
    lock = ROOT / "build" / "lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another build in", ROOT, file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def put_header(package: Path, *, in_place: bool) -> None:
    """Copies HEADER to `package`/include.

    in_place: True: `package` is in a source tree, so the directory gets a .gitignore.
    """
    folder = package / "include"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(HEADER, folder)
    if in_place:
        (folder / ".gitignore").write_text("*\n")


def folder() -> Path:
    """Return the build directory: one for the Makefile's environment (.venv), one for all others.

    The two are separate because the tools of another environment, such as pip's isolated build, may
    be gone by the next build.
    """
    tag = sys.implementation.cache_tag
    ours = Path(ninja.BIN_DIR).resolve().is_relative_to(ROOT / ".venv")
    return ROOT / "build" / (tag if ours else f"{tag}-elsewhere")


def build(folder: Path, targets: list[str], settings: dict[str, str], *, quiet: bool) -> None:
    """Builds `targets` (modules and libraries) in `folder`, for the Python that runs this.

    settings: CMake variables, in addition to the paths of Python and of the tools. In the directory
        of .venv, all other variables keep the values of earlier builds, so that the tests and other
        products there are not compiled again. In the other directory they are reset.
    """
    program = str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
    settings = settings | {
        "CMAKE_MAKE_PROGRAM": str(Path(ninja.BIN_DIR) / "ninja"),
        "HBM_BOX_MODULE": "ON",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    configure = [program, "-S", str(SOURCE), "-B", str(folder), "-G", "Ninja", *definitions]
    if folder.name.endswith("-elsewhere"):
        configure.append("--fresh")  # drops the cached paths of tools, not the compiled files
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL if quiet else None)
    jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
    command = [program, "--build", str(folder), *jobs, "--target", *targets]
    subprocess.run([*command, *(["--", "--quiet"] if quiet else [])], check=True)
