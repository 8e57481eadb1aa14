"""Builds the parts of the package that need no PyTorch, by CMake: see csrc/CMakeLists.txt."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cmake
import ninja
import pybind11

SOURCE = Path(__file__).resolve().parent.parent / "csrc"

LIBRARIES = ["libhbm_verbs", "libhbmsmb"]
HEADER = SOURCE / "smb.h"  # for C programs that link libhbmsmb
PRODUCTS = [f"torch_hbmcomm.{name}" for name in ["_smb", *LIBRARIES]]


def put_header(package: Path, *, in_place: bool) -> None:
    """Copies it to `package`/include; in a source tree (`in_place`) git does not see it there."""
    folder = package / "include"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(HEADER, folder)
    if in_place:
        (folder / ".gitignore").write_text("*\n")


def build(folder: Path, *, quiet: bool) -> None:
    """Builds every product in `folder`, for the Python that runs this."""
    program = str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_FLAGS_RELEASE": "-O3 -g1",
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(folder),
        "CMAKE_MAKE_PROGRAM": str(Path(ninja.BIN_DIR) / "ninja"),
        "HBM_PYTHON_MODULE": "ON",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    if shutil.which("ccache"):
        settings["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    configure = [program, "-S", str(SOURCE), "-B", str(folder), "-G", "Ninja", *definitions]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL if quiet else None)
    jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
    subprocess.run(
        [program, "--build", str(folder), *jobs, *(["--", "--quiet"] if quiet else [])], check=True
    )
