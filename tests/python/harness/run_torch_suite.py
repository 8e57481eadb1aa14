"""Runs PyTorch's own distributed test suite (it ships in the wheel) over a backend.

The suite is not patched. The backend's name is added to its tables of features, and its tests run
as they are, with forked ranks and a FileStore. Over "instead-of-NAME" they ask for NAME, which is
gloo, mpi, ucc or ccl, and HBMCOMM_INSTEAD_OF=NAME gives them hbm.

    export PYTHONPATH=tests/python
    python -m harness.run_torch_suite                # score of hbm at 4 ranks
    python -m harness.run_torch_suite -k send_recv   # tests whose name has a word
    python -m harness.run_torch_suite --compare gloo # tests that only gloo passes
    python -m harness.run_torch_suite --backend gloo --record FILE
    python -m harness.run_torch_suite --backend instead-of-mpi # HBMCOMM_INSTEAD_OF
    python -m harness.run_torch_suite --backend instead-of-gloo --suite rpc
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from harness.network import free_port

INSTEAD_OF = "instead-of-"  # and a name of HBMCOMM_INSTEAD_OF

Case = tuple[type[unittest.TestCase], Callable[[unittest.TestCase], bool]]  # selects tests

FEATURES = ("plugin", "ddp", "subgroup", "gpu", "cuda")
GROUP_WORDS = ("initialize_pg", "init_process_group", "dist.barrier")  # in the source of a test
FOR_GPUS = re.compile(r"^\s*@skip_if_(no_gpu|lt_x_gpu)\b", re.MULTILINE)
TEST_TIMEOUT_SECONDS = 90

# Tests that no third-party backend can pass, each with the text that shows this reason.
OUT_OF_REACH = {
    # Expects DDP to log the backend's name; PyTorch logs "custom" for all except its own.
    "test_ddp_logging_data_cpu": "'custom' != ",
}


@dataclass
class Outcome:
    status: str  # "passed", "failed" or "skipped"
    detail: str  # why it was skipped, or how it failed
    seconds: float


class _Recorder(unittest.TextTestResult):
    """Keeps one Outcome per test, by the test's name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outcomes: dict[str, Outcome] = {}
        self._started = 0.0

    def _note(self, test: unittest.TestCase, status: str, detail: str = "") -> None:
        name = test.id().rpartition(".")[2]
        self.outcomes[name] = Outcome(status, detail, time.monotonic() - self._started)

    def startTest(self, test: unittest.TestCase) -> None:
        self._started = time.monotonic()
        super().startTest(test)

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._note(test, "passed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, "failed", str(err[1]))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._note(test, "failed", str(err[1]))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)


def run_in_this_process(
    suite: str, backend: str, ranks: int, keywords: list[str]
) -> dict[str, Outcome]:
    """Run a suite in this process, once, because a suite reads its environment when imported."""
    backend = backend.removeprefix(INSTEAD_OF)
    os.environ.update(
        BACKEND=backend,
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_TIMEOUT_SECONDS),
    )
    tests = unittest.TestSuite(
        test
        for case, wanted in SUITES[suite](backend)
        for test in map(case, unittest.TestLoader().getTestCaseNames(case))
        if wanted(test) and (not keywords or any(word in test.id() for word in keywords))
    )
    result = unittest.TextTestRunner(resultclass=_Recorder, verbosity=2).run(tests)
    assert isinstance(result, _Recorder)
    return result.outcomes


def source(test: unittest.TestCase) -> str:
    """Return the source of a test, with its decorators."""
    return inspect.getsource(inspect.unwrap(getattr(type(test), test._testMethodName)))


def distributed_suite(backend: str) -> Iterator[Case]:
    """Yield the tests of torch.distributed over the backend.

    Without GPUs, leaves out tests that would skip themselves in each of their processes, because
    such a skip takes as long as a test.
    """
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in FEATURES:
        DistTestCases.backend_feature[feature].add(backend)
    from torch.testing._internal.distributed import distributed_test as upstream

    class TorchSuite(upstream.TestDistBackend, upstream.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            os.environ["MASTER_PORT"] = str(free_port())
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            if backend == "mpi":  # takes its ranks from the launcher's variables
                os.environ["RANK"] = str(rank)
            super()._run(rank, *args, **kwargs)  # type: ignore[no-untyped-call]

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)  # looks at rank 0 only
            codes = [process.exitcode for process in self.processes]
            self.assertFalse([c for c in codes if c and c < 0], f"ranks died by signal: {codes}")

    gpus = torch.cuda.is_available()
    yield TorchSuite, lambda test: gpus or not FOR_GPUS.search(source(test))


def rpc_suite(backend: str) -> Iterator[Case]:
    """Yields the tests of torch.distributed.rpc in which ranks also form a process group.

    These tests name Gloo as its backend. Among them is DDP under distributed autograd.
    """
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed import rpc_utils as upstream
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as agent

    class Forked(MultiProcessTestCase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    suites: Any = upstream
    ddp = (suites.DdpUnderDistAutogradTest, suites.DdpComparisonTest)

    def forms_a_group(test: unittest.TestCase) -> bool:
        return isinstance(test, ddp) or any(word in source(test) for word in GROUP_WORDS)

    assert backend == "gloo", f"the suite of RPC knows no {backend}"
    for case in [*suites.GENERIC_TESTS, *suites.TENSORPIPE_TESTS]:
        bases = (case, agent.TensorPipeRpcAgentTestFixture, Forked)
        yield type(case.__name__, bases, {}), forms_a_group


SUITES: dict[str, Callable[[str], Iterator[Case]]] = {
    "distributed": distributed_suite,
    "rpc": rpc_suite,
}


def run_suite(
    backend: str, ranks: int, keywords: list[str], log: Path, suite: str = "distributed"
) -> dict[str, Outcome]:
    """Runs a suite in a process of its own, whose output goes to `log`."""
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        answer = Path(folder, "outcomes.json")
        command = [sys.executable, "-m", "harness.run_torch_suite", "--suite", suite]
        command += ["--backend", backend, "--ranks", str(ranks)]
        for word in keywords:
            command += ["-k", word]
        command += ["--outcomes", str(answer)]
        environment = dict(os.environ)
        if backend.startswith(INSTEAD_OF):  # read when the process imports torch
            environment["HBMCOMM_INSTEAD_OF"] = backend.removeprefix(INSTEAD_OF)
        status = subprocess.run(
            command,
            cwd=Path(__file__).parents[1],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
        if not answer.exists():
            raise RuntimeError(f"the suite over {backend} died with status {status}; see {log}")
        return {name: Outcome(**found) for name, found in json.loads(answer.read_text()).items()}


def names(outcomes: dict[str, Outcome], status: str) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome.status == status}


def read_pass_list(path: Path) -> set[str]:
    """Return the names in a file written by --record: one a line, '#' starts a comment."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line}


def excused(name: str, outcome: Outcome) -> bool:
    """Return True if the suite skips or fails the test because of the backend's name."""
    if outcome.status == "skipped":
        return "gloo" in outcome.detail.lower()  # "Only gloo backend supports ..."
    return name in OUT_OF_REACH and OUT_OF_REACH[name] in outcome.detail


def shortfall(found: dict[str, Outcome], expected: set[str]) -> dict[str, Outcome]:
    """Return tests that failed, and `expected` tests that were skipped, except excused tests."""
    return {
        name: outcome
        for name, outcome in sorted(found.items())
        if (outcome.status == "failed" or (outcome.status == "skipped" and name in expected))
        and not excused(name, outcome)
    }


def print_score(console: Console, scores: dict[str, dict[str, Outcome]]) -> None:
    table = Table("backend", "passed", "failed", "skipped", "seconds", title="PyTorch's own suite")
    for backend, outcomes in scores.items():
        counts = [str(len(names(outcomes, s))) for s in ("passed", "failed", "skipped")]
        seconds = sum(outcome.seconds for outcome in outcomes.values())
        table.add_row(backend, *counts, f"{seconds:.0f}")
    console.print(table)


def write_pass_list(
    path: Path, suite: str, backend: str, ranks: int, outcomes: dict[str, Outcome]
) -> None:
    import torch

    header = [
        f"# What {backend} passes of a suite of PyTorch {torch.__version__} at {ranks} ranks, by",
        f"# `python -m harness.run_torch_suite --suite {suite} --backend {backend} "
        f"--ranks {ranks}` in tests/python.",
    ]
    path.write_text("\n".join(header + sorted(names(outcomes, "passed"))) + "\n")


def main(
    backend: Annotated[str, typer.Option(help="Backend to run the suite over.")] = "hbm",
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    keyword: Annotated[list[str] | None, typer.Option("-k", help="Only names with this.")] = None,
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = "distributed",
    compare: Annotated[str | None, typer.Option(help="Run this backend too; list gaps.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write the passed names here.")] = None,
    outcomes: Annotated[Path | None, typer.Option(help="Write every outcome as JSON.")] = None,
) -> None:
    keywords = keyword or []
    if outcomes is not None:
        found = run_in_this_process(suite, backend, ranks, keywords)
        outcomes.write_text(json.dumps({name: vars(outcome) for name, outcome in found.items()}))
        return

    console = Console()
    scores: dict[str, dict[str, Outcome]] = {}
    for name in [backend] + ([compare] if compare else []):
        log = Path(tempfile.gettempdir(), f"torch_suite_{suite}_{name}_{ranks}.log")
        console.print(f"running over {name}; output in {log}")
        scores[name] = run_suite(name, ranks, keywords, log, suite)
    print_score(console, scores)
    if record is not None:
        write_pass_list(record, suite, backend, ranks, scores[backend])
    expected = names(scores[compare], "passed") if compare else set()
    for name in sorted(names(scores[backend], "failed") & OUT_OF_REACH.keys()):
        console.print(f"no third-party backend can pass {name}")
    gaps = shortfall(scores[backend], expected)
    for name, outcome in gaps.items():
        passes = f", passes over {compare}" if name in expected else ""
        console.print(f"[red]{outcome.status}{passes}[/red] {name}")
    if gaps:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
