"""Builds the native parts of the package, by CMake: see csrc/CMakeLists.txt."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cmake
import ninja
import pybind11

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "csrc"

LIBRARIES = ["libhbm_verbs", "libhbmsmb"]
LIBRARIES_OF_GROUPS = ["libhbm_memkind"]  # what the process group alone needs
HEADER = SOURCE / "smb.h"  # for C programs that link libhbmsmb


def put_header(package: Path, *, in_place: bool) -> None:
    """Copies it to `package`/include; in a source tree (`in_place`) git does not see it there."""
    folder = package / "include"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(HEADER, folder)
    if in_place:
        (folder / ".gitignore").write_text("*\n")


def folder() -> Path:
    """Return where to build: the Makefile's environment, .venv, has a folder that only it uses.

    The tools of another one, such as pip's for an isolated build, may be gone by the next build.
    """
    tag = sys.implementation.cache_tag
    ours = Path(ninja.BIN_DIR).resolve().is_relative_to(ROOT / ".venv")
    return ROOT / "build" / (tag if ours else f"{tag}-elsewhere")


def build(folder: Path, targets: list[str], settings: dict[str, str], *, quiet: bool) -> None:
    """Builds `targets` (modules and libraries) in `folder`, for the Python that runs this.

    `settings` are CMake's, besides what Python and the tools decide. Those of an earlier build in
    the folder stay, so that tests and another product keep what is compiled.
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
        configure.append("--fresh")  # forget its tools; what is compiled stays
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL if quiet else None)
    jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
    command = [program, "--build", str(folder), *jobs, "--target", *targets]
    subprocess.run([*command, *(["--", "--quiet"] if quiet else [])], check=True)
