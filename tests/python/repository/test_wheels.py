"""Wheels from `make wheel` work on a bare Debian without compiler or libraries. The sdist compiles.

`pytest -m long -rP` on this file prints the times.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
RELEASE = ".".join(torch.__version__.split(".")[:2])
SITE = Path(torch.__file__).parents[1]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def run(*command: str | Path, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, SCRIPTS / "wheels.py", RELEASE, "--into", folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, dist: Path) -> list[str | Path]:
    """Return the words to put before a command, so that it runs on the bare machine."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("a bare system takes root and debootstrap")
    binds = ["-b", f"{dist}:/opt/dist", "-b", f"{SCRIPTS}:/opt/scripts", "-t", str(SITE)]
    root = tmp_path_factory.mktemp("bare") / "root"
    enter: list[str | Path] = [SCRIPTS / "bare_system.sh", *binds, "bookworm", root]
    run(*enter, "true")
    return enter


def the_wheel(dist: Path, name: str) -> zipfile.ZipFile:
    (path,) = dist.glob(f"{name}-*.whl")
    assert "manylinux" in path.name
    return zipfile.ZipFile(path)


@pytest.mark.parametrize("name", ["torch_hbmcomm", "hbmcomm_box"])
def test_a_wheel_requires_the_pytorches_of_its_binaries(dist: Path, name: str) -> None:
    wheel = the_wheel(dist, name)
    folders = {
        found[1] for path in wheel.namelist() if (found := re.search(r"/torch_2_(\d+)/_C", path))
    }
    (metadata,) = (path for path in wheel.namelist() if path.endswith("/METADATA"))
    fields = Parser().parsestr(wheel.read(metadata).decode())
    requirements = [Requirement(text) for text in fields.get_all("Requires-Dist", [])]
    wanted = [one.specifier for one in requirements if one.name == "torch"]
    minors = {str(minor) for minor in range(40) for one in wanted if f"2.{minor}.0" in one}
    assert minors == folders
    assert len(folders) == (name == "torch_hbmcomm")


@pytest.mark.parametrize("name", ["torch_hbmcomm", "hbmcomm_box"])
def test_a_wheel_contains_no_library_of_pytorch_or_rdma(dist: Path, name: str) -> None:
    brought = {
        library[1]
        for path in the_wheel(dist, name).namelist()
        if (library := re.search(rf"{name}\.libs/lib(.+?)-", path))
    }
    assert brought > {"memkind", "numa", "hwloc", "crypto"}
    assert {one for one in brought if re.match("torch|c10|gomp|ibverbs|rdmacm|stdc", one)} == set()


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="looks for packages of dpkg")
def test_the_sbom_has_the_package_of_each_library(dist: Path, tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx")
    shown = run(sys.executable, SCRIPTS / "sbom.py", dist, "--into", tmp_path)
    assert len(list(tmp_path.glob("*.whl.cdx.json"))) == 2
    assert "not found" not in shown


def test_a_bare_machine_trains(bare: list[str | Path]) -> None:
    """Install the wheel and run README.md's program."""
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert program is not None
    Path(bare[-1], "root", "train.py").write_text(program[1])
    assert run(*bare, "sh", "-c", "command -v c++ g++ gcc cc make || echo none") == "none\n"
    begin = time.monotonic()
    run(*bare, "sh", "-euc", "/venv/bin/pip install -q /opt/dist/torch_hbmcomm-*.whl")
    launcher = "torch.distributed.run --standalone --nproc-per-node 2"
    run(*bare, "sh", "-euc", f"/venv/bin/python -m {launcher} /root/train.py")
    print(f"installed and trained in {time.monotonic() - begin:.1f} s")
    run(*bare, "/venv/bin/hbmcomm", "info")


def test_the_trial_of_a_release_passes(bare: list[str | Path]) -> None:
    """The workflow of releases runs the same script on its bare systems."""
    begin = time.monotonic()
    shown = run(*bare, "env", "ENV=/venv", "/opt/scripts/try_wheels.sh", "/opt/dist")
    print(f"tried the wheels in {time.monotonic() - begin:.1f} s")
    assert "OK: the memory box alone\n" in shown
    assert re.search(r"^OK: .*losses over hbm and gloo agree", shown, re.MULTILINE), shown


def test_the_sdist_compiles(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    build = ["pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(sys.executable, "-m", *build, sdist, environment=os.environ | {"CCACHE_DISABLE": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"compiled in {seconds:.0f} s of processor time")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as made:
        assert any(re.search(r"/torch_2_\d+/_C", name) for name in made.namelist())
