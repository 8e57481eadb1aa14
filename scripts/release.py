"""Does the steps of a release, all in this order or one by its name:

    python3 scripts/release.py all --tag v0.2.0

    version    refuses a release if version.py, CHANGELOG.md and the tag differ (versions.py)
    sdist      builds the sdist in dist/ (wheels.py)
    wheels     builds the wheels of both distributions in dist/, --in one or several systems:
               `bookworm` or another suite is a bare Debian or Ubuntu, and its Python
               (debian_wheels.sh); `manylinux` is cibuildwheel's container, and every Python
    sbom       writes build/sbom/*.cdx.json: what each wheel contains and requires (sbom.py)
    checksums  writes build/SHA256SUMS of all these files (checksums.sh)
    try        installs and runs the wheels on a bare Debian or Ubuntu (try_wheels.sh)

.github/workflows/release.yml calls the same steps in the same order, tries the wheels in containers
by try_wheels.sh, and publishes, which no script does. A suite needs root and debootstrap, the
container needs Docker and pipx. If this Python lacks the packages of the extra `wheels`, they are
installed in build/release.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch_releases
import versions
import wheels as here

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
DIST = ROOT / "dist"
SBOM = ROOT / "build" / "sbom"
SUMS = ROOT / "build" / "SHA256SUMS"
SYSTEMS = ROOT / "build" / "bare"
TOOLS = ROOT / "build" / "release"

MANYLINUX = "manylinux"
CIBUILDWHEEL = "cibuildwheel==4.3.3"
SUITE = "bookworm"  # of the trial, unless the wheels are built in other suites
# Each distribution, and the value of HBMCOMM_WITHOUT_TORCH that builds it.
PACKAGES = {"torch_hbmcomm": "0", "hbmcomm-box": "1"}
RELEASES = [f"2.{minor}" for minor in range(torch_releases.OLDEST, torch_releases.NEWEST + 1)]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def version(asked: argparse.Namespace) -> None:
    print(f"version {versions.check(ROOT, asked.tag or None)}")


def sdist(asked: argparse.Namespace) -> None:
    run(tools(), SCRIPTS / "wheels.py", "--only", "sdist", "--into", DIST)


def wheels(asked: argparse.Namespace) -> None:
    for system in asked.systems:
        if system == MANYLINUX:
            builder = ["pipx", "run", "--spec", CIBUILDWHEEL, "cibuildwheel"]
            for package in asked.packages:
                run(*builder, "--output-dir", DIST, HBMCOMM_WITHOUT_TORCH=PACKAGES[package])
        else:
            folders = ":".join(str(here.unpacked(release)) for release in asked.releases)
            script = SCRIPTS / "debian_wheels.sh"
            run(script, system, build_system(system), DIST, HBMCOMM_TORCH=folders)


def sbom(asked: argparse.Namespace) -> None:
    built_in = [("--system", build_system(system)) for system in asked.systems]
    options = [word for option in built_in if option[1].exists() for word in option]
    run(tools(), SCRIPTS / "sbom.py", DIST, "--into", SBOM, *options)


def checksums(asked: argparse.Namespace) -> None:
    SUMS.parent.mkdir(exist_ok=True)
    SUMS.write_text(output(SCRIPTS / "checksums.sh", DIST, SBOM))


def try_wheels(asked: argparse.Namespace) -> None:
    script = SCRIPTS / "bare_system.sh"
    for suite in [one for one in asked.systems if one != MANYLINUX] or [SUITE]:
        system = SYSTEMS / suite
        python = Path(output(script, suite, system, "readlink", "-f", "/usr/bin/python3").strip())
        shutil.rmtree(system / "venv", ignore_errors=True)  # of an earlier trial
        options = ["-b", f"{DIST}:/opt/dist", "-b", f"{SCRIPTS}:/opt/scripts"]
        index = ["--extra-index-url", CPU_INDEX]
        torch = importlib.util.find_spec("torch")
        if python.name == "python{}.{}".format(*sys.version_info) and torch and torch.origin:
            options += ["-t", str(Path(torch.origin).parents[1])]
            index = []
        trial = ["env", "ENV=/venv", "/opt/scripts/try_wheels.sh", "/opt/dist", *index]
        run(script, *options, suite, system, *trial)


STEPS: dict[str, Callable[[argparse.Namespace], None]] = {
    "version": version,
    "sdist": sdist,
    "wheels": wheels,
    "sbom": sbom,
    "checksums": checksums,
    "try": try_wheels,
}


def build_system(suite: str) -> Path:
    """Return the root of the system that builds the wheels, which has a compiler."""
    return SYSTEMS / f"{suite}-build"


def tools() -> Path:
    """Return a Python that has the requirements of a build and of the extra `wheels`."""
    if all(importlib.util.find_spec(name) for name in ("auditwheel", "build", "cyclonedx")):
        return Path(sys.executable)
    python = TOOLS / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", TOOLS)
    needed = output(python, SCRIPTS / "requirements.py", "--build", "wheels").split("\n")
    run(python, "-m", "pip", "install", "--quiet", *filter(None, needed))
    return python


def run(*command: str | Path, **environment: str) -> None:
    subprocess.run(list(map(str, command)), cwd=ROOT, env=os.environ | environment, check=True)


def output(*command: str | Path) -> str:
    return subprocess.check_output(list(map(str, command)), cwd=ROOT, text=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=[*STEPS, "all"])
    parser.add_argument("--tag", help="of the release; without one, a development version passes")
    parser.add_argument("--in", dest="systems", nargs="+", default=[SUITE])
    parser.add_argument("--package", dest="packages", choices=PACKAGES, action="append")
    parser.add_argument("--torch", dest="releases", nargs="+", default=RELEASES)
    asked = parser.parse_args()
    if asked.packages and asked.systems != [MANYLINUX]:
        parser.error(f"--package needs --in {MANYLINUX}: a suite builds both")
    asked.packages = asked.packages or list(PACKAGES)
    if asked.step == "all" and DIST.exists() and (left := sorted(DIST.iterdir())):
        sys.exit(f"{DIST} has {left[0].name} of an earlier build: move its files away first")
    try:
        for name, step in STEPS.items():
            if asked.step in (name, "all"):
                print(f"-- {name}", flush=True)
                step(asked)
    except versions.Mismatch as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"the step {name} failed: {error}")


if __name__ == "__main__":
    main()
