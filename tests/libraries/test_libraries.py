"""Libraries that call torch.distributed train over hbm to the same numbers as over Gloo.

`make test-libraries` runs these tests, in their own environment (requirements*.txt). Each program
in programs/ trains with one library, first over Gloo. The program writes its numbers, and the class
of the backend that reduced its gradients (programs/evidence.py). docs/libraries.md has the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import surroundings
import torch
from harness import shm
from harness.jobs import Finished, run
from harness.network import free_port

surroundings.settle()
shm.isolate()  # DeepSpeed's operator leaves files in /dev/shm
# DeepSpeed keeps its compiled operators in this folder.
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix, "torch_extensions"))

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "libraries.md").read_text()

# Seconds for one training, which takes 5 to 20 s (Ray 40) on an idle machine.
LIMIT = 240
pytestmark = pytest.mark.timeout(2 * LIMIT + 60)

# Libraries that start their ranks themselves. torchrun starts those of the others.
STARTING_RANKS = {"fabric", "lightning", "ray", "torchrl"}

# Interpreters of libraries that need other versions: requirements_NAME.txt.
INTERPRETERS = {"torchrl": Path(sys.prefix, "torchrl", "bin", "python")}

# Ways in which a program selects hbm.
UNMODIFIED = "HBMCOMM_INSTEAD_OF=gloo"
NAMED = "--backend=hbm"  # the library gets the name of the backend
FORMED = "--group=hbm"  # the program forms the group: the library takes any group, but not the name

WAYS = {
    "accelerate": (UNMODIFIED, FORMED),
    "deepspeed": (UNMODIFIED, NAMED),
    "deepspeedinference": (UNMODIFIED, NAMED),
    "fabric": (UNMODIFIED, NAMED),
    "fairscale": (UNMODIFIED, NAMED),
    "geometric": (UNMODIFIED, NAMED),
    "ignite": (UNMODIFIED, FORMED),
    "lightly": (UNMODIFIED, NAMED),
    "lightning": (UNMODIFIED, NAMED),
    "metriclearning": (UNMODIFIED, NAMED),
    "monai": (UNMODIFIED, NAMED),
    "optuna": (UNMODIFIED, NAMED),
    "pipelining": (UNMODIFIED, NAMED),
    "ray": (UNMODIFIED, NAMED),
    "sentencetransformers": (UNMODIFIED, FORMED),
    "tensordict": (UNMODIFIED, NAMED),
    "tensorparallel": (UNMODIFIED, FORMED),
    "timm": (UNMODIFIED, NAMED),
    "torchft": (UNMODIFIED,),
    "torchmetrics": (UNMODIFIED, NAMED),
    "torchrec": (UNMODIFIED, NAMED),
    "torchrl": (UNMODIFIED, NAMED),
    "transformers": (UNMODIFIED, FORMED),
    "trl": (UNMODIFIED, FORMED),
}
WITH_ARGUMENTS = {"deepspeed", "deepspeedinference", "pipelining", "trl"}
TRAININGS = [
    *((name, 2) for name in WAYS if name not in WITH_ARGUMENTS),
    ("accelerate", 4),
    ("deepspeed 1", 2),  # the stage of ZeRO
    ("deepspeed 2", 2),
    ("deepspeed 2", 4),
    ("deepspeedinference group", 2),  # adds the activations, or DeepSpeed's own operator does
    ("deepspeedinference operator", 2),
    ("pipelining gpipe", 2),  # the schedule
    ("pipelining 1f1b", 2),
    ("pipelining interleaved", 2),
    ("pipelining zero-bubble", 2),
    ("pipelining zbv", 2),
    ("trl grpo", 2),  # the method
    ("trl sft", 2),
]
# Output of a process over Gloo that aborts at its end, after it has written its numbers. This
# happens in one of ten runs of torchmetrics on a busy machine, with PyTorch 2.13. Over hbm it is a
# failure.
GLOO_ABORTS = "terminate called without an active exception"
REFUSALS = {
    "accelerate": "Your assigned backend hbm is not available, please use gloo",
    "ignite": "Unknown backend 'hbm'. Available backends: ('gloo',)",
    "transformers": "Your assigned backend hbm is not available, please use gloo",
}
# Packages that the page does not name: torch, and one that torchrec imports.
UNNAMED = {"pyre-extensions", "torch"}


def library(training: str) -> str:
    return training.split()[0]


NEEDS_AVX2 = pytest.mark.skipif(
    "avx2" not in Path("/proc/cpuinfo").read_text(), reason="DeepSpeed's operator needs AVX2"
)


def marks(training: str) -> list[pytest.MarkDecorator]:
    """All cases of one library run in one process of pytest-xdist, to share the results over
    Gloo."""
    group = pytest.mark.xdist_group(library(training))
    return [group, NEEDS_AVX2] if training == "deepspeedinference operator" else [group]


CASES = [
    pytest.param(training, ranks, way, marks=marks(training))
    for training, ranks in TRAININGS
    for way in WAYS[library(training)]
]


def train(training: str, ranks: int, way: str | None, folder: Path) -> Finished:
    name, *rest = training.split()
    command: list[str | Path] = [INTERPRETERS.get(name, sys.executable)]
    if name not in STARTING_RANKS:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [HERE / "programs" / f"with_{name}.py", f"--folder={folder}", f"--ranks={ranks}"]
    settings = {"TCP_PORT": str(free_port())}  # of torchrl's own rendezvous
    if way == UNMODIFIED:
        return run([*command, *rest], LIMIT, HBMCOMM_INSTEAD_OF="gloo", **settings)
    return run([*command, *rest, *([way] if way else [])], LIMIT, **settings)


def evidence(
    finished: Finished, ranks: int, folder: Path, backend: str = "ProcessGroupHbm"
) -> list[dict[str, Any]]:
    """Return the report of each rank, and assert that `backend` reduced its gradients."""
    excused = backend == "ProcessGroupGloo" and GLOO_ABORTS in finished.output
    assert finished.code == 0 or excused, finished.output
    found: list[dict[str, Any]] = [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
    assert {shown["size"] for shown in found} == {ranks}
    assert {shown["backend"] for shown in found} == {backend}
    return found


@cache
def over_gloo(training: str, ranks: int) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        finished = train(training, ranks, None, Path(folder))
        return evidence(finished, ranks, Path(folder), "ProcessGroupGloo")


@pytest.mark.parametrize(("training", "ranks", "way"), CASES)
def test_same_numbers_as_over_gloo(training: str, ranks: int, way: str, tmp_path: Path) -> None:
    expected = over_gloo(training, ranks)
    finished = train(training, ranks, way, tmp_path)
    found = evidence(finished, ranks, tmp_path)
    assert {shown["reported"] for shown in found} == {"gloo" if way == UNMODIFIED else "hbm"}
    # A sum of two numbers is rounded once, so both backends get the same bits. With more ranks sums
    # may differ: hbm adds in the order of the ranks, Gloo in another order.
    tolerance = 0 if ranks == 2 else 1e-5
    for ours, by_gloo in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours["numbers"], by_gloo["numbers"], rtol=tolerance, atol=tolerance
        )
        # The ranks saw different data: without synchronisation their weights would differ.
        assert torch.equal(ours["numbers"]["weights"], found[0]["numbers"]["weights"])
    assert "[hbm" not in finished.output, finished.output


@pytest.mark.xdist_group("torchft")
def test_torchft_continues_after_a_death(tmp_path: Path) -> None:
    found = {}
    for backend, way in (("ProcessGroupGloo", None), ("ProcessGroupHbm", UNMODIFIED)):
        folder = tmp_path / backend
        folder.mkdir()
        [found[backend]] = evidence(train("torchft death", 2, way, folder), 1, folder, backend)
    numbers = found["ProcessGroupHbm"]["numbers"]
    assert numbers["committed"] == 19  # of 20 steps: all but the step in which the other rank died
    torch.testing.assert_close(numbers, found["ProcessGroupGloo"]["numbers"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in REFUSALS]
)
def test_libraries_refuse_the_name_as_documented(name: str, tmp_path: Path) -> None:
    finished = train(name, 2, NAMED, tmp_path)
    assert finished.code != 0
    assert REFUSALS[name] in finished.output, finished.output
    assert REFUSALS[name] in PAGE


def installed(package: str, interpreter: Path | None) -> str:
    if not interpreter:
        return version(package)
    query = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([interpreter, "-c", query], text=True).strip()


def test_the_page_has_the_installed_versions() -> None:
    for file in HERE.glob("requirements*.txt"):
        own = INTERPRETERS.get(file.stem.removeprefix("requirements_"))
        for line in file.read_text().splitlines():
            if not line.startswith("#"):
                name, _, pinned = line.partition("==")
                name = name.partition("[")[0]
                assert installed(name, own).partition("+")[0] == pinned
                assert f"{name} {pinned}" in PAGE or name in UNNAMED, f"{name} {pinned}"
