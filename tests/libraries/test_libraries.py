"""Libraries that call torch.distributed train over hbm as they do over Gloo, to the same numbers.

`make test-libraries` runs these tests, in an environment of their own (requirements.txt). Each of
programs/ trains with one library, first over Gloo; it writes its numbers, and the class of the
backend that reduced its gradients (programs/evidence.py). docs/libraries.md is the table of it.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import surroundings
import torch
from harness.jobs import Finished, run

surroundings.settle()
# Where DeepSpeed has compiled what it needs.
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix, "torch_extensions"))

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "libraries.md").read_text()

# Of a training, which takes 5 to 20 s (Ray 40) on a machine that does nothing else.
LIMIT = 240
pytestmark = pytest.mark.timeout(2 * LIMIT + 60)

# Whose ranks torchrun starts; the others start theirs by themselves.
UNDER_TORCHRUN = {"accelerate", "deepspeed", "ignite", "torchft", "torchmetrics", "transformers"}

# How a program comes to use hbm.
UNMODIFIED = "HBMCOMM_INSTEAD_OF=gloo"
NAMED = "--backend=hbm"  # to the library
FORMED = "--group=hbm"  # by the program, since the library takes any group, but not the name

WAYS = {
    "accelerate": (UNMODIFIED, FORMED),
    "deepspeed": (UNMODIFIED, NAMED),
    "fabric": (UNMODIFIED, NAMED),
    "ignite": (UNMODIFIED, FORMED),
    "lightning": (UNMODIFIED, NAMED),
    "ray": (UNMODIFIED, NAMED),
    "torchft": (UNMODIFIED,),
    "torchmetrics": (UNMODIFIED, NAMED),
    "transformers": (UNMODIFIED, FORMED),
}
TRAININGS = [
    *((name, 2) for name in WAYS if name != "deepspeed"),
    ("accelerate", 4),
    ("deepspeed 1", 2),  # the stage of ZeRO
    ("deepspeed 2", 2),
    ("deepspeed 2", 4),
]
# What a process with Gloo says that aborts at its very end, when it has shown its numbers: one run
# in ten of torchmetrics' on a busy machine, with PyTorch 2.13. None over hbm may.
GLOO_ABORTS = "terminate called without an active exception"
REFUSALS = {
    "accelerate": "Your assigned backend hbm is not available, please use gloo",
    "ignite": "Unknown backend 'hbm'. Available backends: ('gloo',)",
    "transformers": "Your assigned backend hbm is not available, please use gloo",
}


def library(training: str) -> str:
    return training.split()[0]


# Those of one library run in one process of pytest-xdist, where they share what Gloo gave.
CASES = [
    pytest.param(training, ranks, way, marks=pytest.mark.xdist_group(library(training)))
    for training, ranks in TRAININGS
    for way in WAYS[library(training)]
]


def train(training: str, ranks: int, way: str | None, folder: Path) -> Finished:
    name, *rest = training.split()
    command: list[str | Path] = [sys.executable]
    if name in UNDER_TORCHRUN:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [HERE / "programs" / f"with_{name}.py", f"--folder={folder}", f"--ranks={ranks}"]
    if way == UNMODIFIED:
        return run([*command, *rest], LIMIT, HBMCOMM_INSTEAD_OF="gloo")
    return run([*command, *rest, *([way] if way else [])], LIMIT)


def evidence(
    finished: Finished, ranks: int, folder: Path, backend: str = "ProcessGroupHbm"
) -> list[dict[str, Any]]:
    """Return what the program showed on the ranks of its last group, which was of that backend."""
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
    # Two numbers have one sum. Gloo adds more of them up in another order than by rank.
    tolerance = 0 if ranks == 2 else 1e-5
    for ours, by_gloo in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours["numbers"], by_gloo["numbers"], rtol=tolerance, atol=tolerance
        )
        # The ranks saw different data: without synchronisation their weights would differ.
        assert torch.equal(ours["numbers"]["weights"], found[0]["numbers"]["weights"])
    assert "[hbm" not in finished.output, finished.output


@pytest.mark.xdist_group("torchft")
def test_torchft_goes_on_after_a_death(tmp_path: Path) -> None:
    found = {}
    for backend, way in (("ProcessGroupGloo", None), ("ProcessGroupHbm", UNMODIFIED)):
        folder = tmp_path / backend
        folder.mkdir()
        [found[backend]] = evidence(train("torchft death", 2, way, folder), 1, folder, backend)
    numbers = found["ProcessGroupHbm"]["numbers"]
    assert numbers["committed"] == 19  # of 20 steps: not the one in which the other rank died
    torch.testing.assert_close(numbers, found["ProcessGroupGloo"]["numbers"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in REFUSALS]
)
def test_who_refuses_the_name(name: str, tmp_path: Path) -> None:
    finished = train(name, 2, NAMED, tmp_path)
    assert finished.code != 0
    assert REFUSALS[name] in finished.output, finished.output
    assert REFUSALS[name] in PAGE


def test_the_page_has_the_versions() -> None:
    for line in (HERE / "requirements.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, pinned = line.partition("==")
            name = name.partition("[")[0]
            assert version(name).partition("+")[0] == pinned
            assert f"{name} {pinned}" in PAGE or name == "torch", f"{name} {pinned}"
