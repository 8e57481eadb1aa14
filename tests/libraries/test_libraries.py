"""Libraries that call torch.distributed train over hbm to the same numbers as over Gloo.

`make test-libraries` runs these tests, in their own environment (requirements*.txt). Each program
in programs/ trains with one library, first over Gloo. The program writes its numbers, and the class
of the backend that reduced its gradients (programs/evidence.py). docs/libraries.md has the table.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import surroundings
import torch
from harness import shm
from harness.jobs import Finished, environment, run
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
INTERPRETERS = {name: Path(sys.prefix, name, "bin", "python") for name in ("ccl", "torchrl")}

# Ways in which a program selects hbm.
UNMODIFIED = "HBMCOMM_INSTEAD_OF=gloo"
LIKE_MPI = "HBMCOMM_INSTEAD_OF=mpi"  # for a library that takes MPI if PyTorch has it
NAMED_UCC = "HBMCOMM_INSTEAD_OF=ucc --backend=ucc"
NAMED = "--backend=hbm"  # the library gets the name of the backend
FORMED = "--group=hbm"  # the program forms the group: the library takes any group, but not the name

WAYS = {
    "accelerate": (UNMODIFIED, LIKE_MPI, FORMED),
    "deepspeed": (UNMODIFIED, NAMED),
    "deepspeedinference": (UNMODIFIED, NAMED),
    "fabric": (UNMODIFIED, NAMED_UCC, NAMED),
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


Line = dict[str, Any]  # of programs/torchft_replica.py


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


def train(
    training: str, ranks: int, way: str | None, folder: Path, versions: str | None = None
) -> Finished:
    """Run the program of a training with the library's version in requirements.txt, or with the one
    in requirements_`versions`.txt."""
    name, *rest = training.split()
    command: list[str | Path] = [INTERPRETERS.get(versions or name, sys.executable)]
    if name not in STARTING_RANKS:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [HERE / "programs" / f"with_{name}.py", f"--folder={folder}", f"--ranks={ranks}"]
    settings = {"TCP_PORT": str(free_port())}  # of torchrl's own rendezvous
    if versions == "ccl":
        settings["CCL_WORKER_COUNT"] = "1"  # oneCCL's; without it accelerate refuses "ccl"
    for part in way.split() if way else []:
        variable, _, value = part.partition("=")
        if variable == "HBMCOMM_INSTEAD_OF":
            settings[variable] = value
        else:
            rest.append(part)
    return run([*command, *rest], LIMIT, **settings)


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
    names = {UNMODIFIED: "gloo", LIKE_MPI: "mpi", NAMED_UCC: "ucc"}
    assert {shown["reported"] for shown in found} == {names.get(way, "hbm")}
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


@pytest.mark.xdist_group("ccl")
@pytest.mark.parametrize("name", ["accelerate", "transformers"])
@pytest.mark.parametrize("backend", ["ccl", "mpi"])
def test_releases_that_know_ccl_train_over_hbm(name: str, backend: str, tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {}
    asked = f"HBMCOMM_INSTEAD_OF={backend} --backend={backend}"
    for reported, way in (("gloo", "--backend=gloo"), (backend, asked)):
        folder = tmp_path / reported
        folder.mkdir()
        finished = train(name, 2, way, folder, "ccl")
        shown = evidence(finished, 2, folder, "ProcessGroup" + ("Hbm" if found else "Gloo"))
        assert {one["reported"] for one in shown} == {reported}
        found[reported] = [one["numbers"] for one in shown]
    torch.testing.assert_close(found[backend], found["gloo"], rtol=0, atol=0)


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


# The group that dies, and the commits after which it does: every ten steps of the optimizer.
TORCHFT_DEATHS = {
    "ddp": {10: 1, 20: 0, 30: 1},
    "diloco": {5: 1, 10: 0, 15: 1},
    "localsgd": {5: 1, 10: 0, 15: 1},
    "manager": {10: 1, 20: 0, 30: 1},
}


def restart_torchft_replicas(method: str, instead_of: str, folder: Path) -> list[list[Line]]:
    """Train with two replica groups. Start each group again after its deaths.

    A quorum needs two groups, so the live group waits for the restarted one. So the numbers are
    the same in every run. Returns the lines of programs/torchft_replica.py, for each group.
    """
    from torchft.coordination import LighthouseServer

    deaths = TORCHFT_DEATHS[method]
    steps = max(deaths) + min(deaths)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    variables = environment(
        TORCHFT_LIGHTHOUSE=lighthouse.address(), HBMCOMM_INSTEAD_OF=instead_of, OMP_NUM_THREADS="1"
    )
    with ExitStack() as stack:
        stack.callback(lighthouse.shutdown)

        def start(replica: int, after: int) -> subprocess.Popen[bytes]:
            ends = [step for step, victim in deaths.items() if victim == replica and step > after]
            own = [method, str(replica), str(steps), str(min(ends, default=-1))]
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, HERE / "programs" / "torchft_replica.py", folder, *own],
                    env=variables,
                    stdout=stack.enter_context(open(folder / f"output{replica}", "ab")),
                    stderr=subprocess.STDOUT,
                )
            )
            stack.callback(process.kill)
            return process

        def output() -> str:
            return "\n".join(file.read_text() for file in folder.glob("output*"))

        running = [start(replica, -1) for replica in range(2)]
        for step, victim in deaths.items():
            assert running[victim].wait(LIMIT) == -signal.SIGKILL, output()
            running[victim] = start(victim, step)
        for process in running:
            assert process.wait(LIMIT) == 0, output()
        assert "[hbm" not in output(), output()
    texts = [(folder / f"replica{replica}.jsonl").read_text() for replica in range(2)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


@pytest.mark.xdist_group("torchft")
@pytest.mark.timeout(6 * LIMIT)
@pytest.mark.parametrize("method", TORCHFT_DEATHS)
def test_torchft_replicas_recover_from_each_other(method: str, tmp_path: Path) -> None:
    deaths = TORCHFT_DEATHS[method]
    committed: dict[str, list[list[tuple[Any, ...]]]] = {}
    for backend, instead_of in (("ProcessGroupGloo", ""), ("ProcessGroupHbm", "gloo")):
        folder = tmp_path / backend
        folder.mkdir()
        lines = restart_torchft_replicas(method, instead_of, folder)
        committed[backend] = [
            [(line["step"], line["loss"], line["after"]) for line in own if line["committed"]]
            for own in lines
        ]
    # `lines` is now of hbm.
    weights = {step: digest for own in committed["ProcessGroupHbm"] for step, _, digest in own}
    for replica, own in enumerate(lines):
        assert {line["backend"] for line in own} == {"ProcessGroupHbm"}
        # Each group has every step once. So no count goes back, and a restarted group continues
        # from the commits of the other.
        assert [step for step, _, _ in committed["ProcessGroupHbm"][replica]] == list(
            range(1, max(weights) + 1)
        )
        # Both groups have the same bits after each commit, also after the first of a restarted one.
        assert all(line["after"] == weights[line["step"]] for line in own if line["committed"])
        failed = [line["step"] for line in own if not line["committed"]]
        survived = [step for step, victim in deaths.items() if victim != replica]
        assert failed == ([] if method == "ddp" else survived)  # with ddp none dies in a step
        for previous, line in pairwise(own):
            if previous["process"] == line["process"] and previous["step"] > 0:
                if method == "localsgd":  # does not undo the steps since the last commit
                    assert line["before"] == previous["after"]
                else:
                    assert line["before"] == weights[previous["step"]]
    assert committed["ProcessGroupHbm"] == committed["ProcessGroupGloo"]


@pytest.mark.xdist_group("torchft")
def test_torchft_aborts_a_pending_operation() -> None:
    program = HERE / "programs" / "torchft_abort.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    finished = run([*torchrun, "--nproc-per-node=2", program], LIMIT, HBMCOMM_INSTEAD_OF="gloo")
    assert finished.code == 0, finished.output
    assert 'was cancelled: group "" was aborted on rank 0' in finished.output, finished.output


@pytest.mark.xdist_group("torchft")
@pytest.mark.parametrize("instead_of", ["", "gloo"], ids=["over Gloo", "over hbm"])
def test_outer_steps_learn_as_torchfts_diloco(instead_of: str, tmp_path: Path) -> None:
    """papers/outer_steps compares the two, which compute the same up to rounding."""
    record, ways = tmp_path / "rows.jsonl", ["outer,every=4,momentum=0.9", "torchft,every=4"]
    command = [sys.executable, "-m", "papers.outer_steps", "--workers", "2", "--steps", "40"]
    command += ["--contenders", *ways, "--json", str(record)]
    root = str(HERE.parents[1])
    finished = run(command, LIMIT, HBMCOMM_INSTEAD_OF=instead_of, PYTHONPATH=root)
    assert finished.code == 0, finished.output
    ours, theirs = (json.loads(line) for line in record.read_text().splitlines())
    # The evaluations after steps 4, 8 ... are right after meetings. The test data has 179 images,
    # and the two may classify two of them differently.
    assert theirs["quality_at"][1::2] == pytest.approx(ours["quality_at"][1::2], abs=1.2)


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
