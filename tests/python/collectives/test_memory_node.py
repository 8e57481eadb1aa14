"""A memory node: the box alone, installed as the README says, without PyTorch and MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]

# The timeout is long, because the fixture `node` compiles the box if `make build` has not run.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

# A client of the box at argv[1].
CLIENT = """
import sys
import numpy
from importlib.util import find_spec
from torch_hbmcomm import smb

assert find_spec("torch") is None and find_spec("mpich") is None
with smb.connect(sys.argv[1]) as box:
    total, part = box.alloc(4096, key="total"), box.alloc(4096)
    for segment, value in (total, 1), (part, 2):
        segment.numpy("float32")[:] = value
        segment.write()
    total.accumulate(part, "float32", scale=0.5)
    total.read()
    assert (total.numpy("float32") == 2).all()
"""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env=environment or outside(),
        cwd="/",
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def outside(**settings: str) -> dict[str, str]:
    """Return os.environ without PYTHON* variables, which lead to this interpreter's packages."""
    names = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    return names | settings


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the box alone in a new virtual environment. Return the environment's `bin` folder."""
    folder = tmp_path_factory.mktemp("node")
    # Build the wheel in this environment, which has the tools and the files of `make build`.
    wheel = [*PIP, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    run(sys.executable, *wheel, ROOT, environment=outside(HBMCOMM_WITHOUT_TORCH="1"))
    run(sys.executable, "-m", "venv", folder / "venv")
    programs = folder / "venv" / "bin"
    run(programs / "python", *PIP, "install", *folder.glob("*.whl"))
    return programs


@pytest.fixture
def box(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a box that `hbmcomm serve` runs on the node."""
    monkeypatch.setenv("HBMCOMM_TOKEN_FILE", str(tmp_path / "token"))
    command = [str(node / "hbmcomm"), "serve", "--listen", "127.0.0.1:0", "--memory", "16MiB"]
    with subprocess.Popen(command, env=outside(), text=True, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.send_signal(signal.SIGTERM)
        server.stdout.read()
        assert server.wait(30) == 0


def test_the_node_has_the_box_alone(node: Path) -> None:
    listing = "from importlib.metadata import distributions as d; print(*(i.name for i in d()))"
    installed = run(node / "python", "-c", listing).lower().split()
    assert "hbmcomm-box" in installed
    assert {"torch", "torch-hbmcomm", "mpich"}.isdisjoint(installed)
    run(node / "python", *PIP, "check")
    found = (
        "import torch_hbmcomm as p, pathlib; print(*pathlib.Path(p.__file__).parent.glob('*.so'))"
    )
    names = {
        Path(name).name.partition(".")[0] for name in run(node / "python", "-c", found).split()
    }
    assert names == {"_smb", "libhbm_verbs", "libhbmsmb"}


def test_it_registers_no_backend_with_pytorch(node: Path) -> None:
    groups = (
        "from importlib.metadata import distribution as d; "
        "print(*{point.group for point in d('hbmcomm-box').entry_points})"
    )
    assert run(node / "python", "-c", groups).split() == ["console_scripts"]


def test_it_serves_a_client(node: Path, box: str) -> None:
    run(node / "python", "-c", CLIENT, box)


def test_it_says_what_it_lacks(node: Path) -> None:
    asked = subprocess.run(
        [node / "python", "-c", "import torch_hbmcomm; torch_hbmcomm.Options"],
        env=outside(),
        cwd="/",
        text=True,
        capture_output=True,
    )
    assert asked.returncode == 1
    assert "No module named 'torch'" in asked.stderr
