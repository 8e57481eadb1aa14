"""torchrun restarts the workers of a training, or their number changes.

The training is tests/python/harness/recovering.py: every rank checks the sum of each step. torchrun
would restart a rank that fails this check, so the rank also leaves a file.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path

import pytest
import torch
from harness import beyond_gloo, jobs
from harness.network import free_port, skip_unless_namespaces_work

from benchmarks.namespaces import two_nodes

LIMIT = 240.0  # seconds, for a wait of some ten on an idle machine
pytestmark = [
    beyond_gloo,
    pytest.mark.full,
    pytest.mark.timeout(3 * LIMIT),
    pytest.mark.usefixtures("nothing_left"),
]

TRAINING = Path(jobs.JOB_SCRIPT).with_name("recovering.py")
WORKERS = 2  # of each agent
WITHOUT_END = 10**6  # steps


@pytest.fixture
def launcher() -> Iterator[Sequence[str]]:
    """Yield the words that run a command in a network namespace of this test.

    torchrun chooses the port of the workers' store, and a worker listens there seconds later. In
    the namespace no other process takes the port before the worker.
    """
    skip_unless_namespaces_work()
    with two_nodes(rate=None) as (node, _):
        yield node.launcher


class Agents:
    """Starts agents of one job, which meet on this machine.

    launcher: the words before an agent's command
    An agent that is silent for ten seconds counts as lost.
    """

    def __init__(
        self,
        launcher: Sequence[str],
        folder: Path,
        nodes: str,
        steps: int,
        kills: str,
        restarts: int,
    ) -> None:
        self._launcher = launcher
        self._point = f"127.0.0.1:{free_port()}"
        self._options = (f"--nnodes={nodes}", f"--max-restarts={restarts}")
        self._training = (TRAINING, folder, str(steps), kills)

    def start(self, node: str) -> jobs.Job:
        """Start an agent with ranks on a node of their own. Node "a" serves the agents' store."""
        waits = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=5"
        rendezvous = (
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self._point}",
            "--rdzv-id=job",
            f"--rdzv-conf=is_host={str(node == 'a').lower()},{waits}",
            f"--nproc-per-node={WORKERS}",
        )
        return jobs.Job(
            [*self._launcher, jobs.BIN / "torchrun", *rendezvous, *self._options, *self._training],
            HBMCOMM_NODE_ID=node,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # docs/running.md has the reason
        )


def sizes(folder: Path) -> list[int]:
    """Return the number of ranks of each step in the checkpoint."""
    saved = folder / "checkpoint"
    found: list[int] = torch.load(saved)[1] if saved.exists() else []
    return found


def await_steps(folder: Path, count: int, ranks: int, *agents: jobs.Job) -> None:
    """Wait until the last `count` steps of the checkpoint had `ranks` ranks."""
    deadline = time.monotonic() + LIMIT
    while sizes(folder)[-count:] != [ranks] * count:
        if time.monotonic() > deadline or any(agent.ended() for agent in agents):
            (folder / "enough").touch()
            outputs = [agent.finish(30).output for agent in agents]
            raise AssertionError("\n".join([f"{ranks} ranks do not train together", *outputs]))
        time.sleep(0.05)


def assert_resumed(finished: jobs.Finished, ranks: int, folder: Path) -> int:
    """Assert that the last ranks ended well. Returns the step from which they resumed."""
    assert finished.code == 0, finished.output
    wrong = [file.read_text() for file in folder.glob("wrong*")]
    assert not wrong, wrong
    steps = len(sizes(folder))
    line = rf"rank \d of {ranks}: weight {steps} after {steps} steps, from step (\d+)"
    found = [int(step) for step in re.findall(line, finished.output)]
    assert len(found) == WORKERS, finished.output
    assert len(set(found)) == 1
    return found[0]


def processes(folder: Path) -> dict[int, str]:
    """Return the living processes that have the folder in their command line: agents, workers."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            text = (entry / "cmdline").read_text()  # empty for a process that has ended
            if str(folder) in text and int(entry.name) != os.getpid():
                found[int(entry.name)] = text.replace("\0", " ")
    return found


def assert_no_process_left(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT / 4  # a process that was signalled may take a moment to end
    while (left := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield an empty directory. If the test fails, end the agents and the workers that use it."""
    yield tmp_path
    for process in processes(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("nodes", ["a", "ab"], ids=["one agent", "two agents"])
def test_all_workers_restart_from_the_checkpoint(
    nodes: str, folder: Path, launcher: Sequence[str]
) -> None:
    """A worker is killed, and later rank 0. With two agents the ranks use MPI."""
    steps, ranks = 20, WORKERS * len(nodes)
    agents = Agents(launcher, folder, str(len(nodes)), steps, f"7:{ranks - 1},14:0", 2 * len(nodes))
    with ExitStack() as stack:
        running = [stack.enter_context(agents.start(node)) for node in nodes]
        for job in running:
            assert assert_resumed(job.finish(LIMIT), ranks, folder) >= 14
        assert_no_process_left(folder)
    assert sizes(folder) == [ranks] * steps


@pytest.mark.parametrize(
    "end", [signal.SIGTERM, signal.SIGKILL], ids=["agent ended", "machine lost"]
)
def test_a_second_node_comes_and_goes(
    end: signal.Signals, folder: Path, launcher: Sequence[str]
) -> None:
    """The second agent is ended, or its machine is lost: its agent and its workers are killed."""
    agents = Agents(launcher, folder, "1:2", WITHOUT_END, "", 3)
    with agents.start("a") as first:
        await_steps(folder, 3, WORKERS, first)
        with agents.start("b") as second:
            await_steps(folder, 3, 2 * WORKERS, first, second)
            second.signal(end)
            if end == signal.SIGKILL:
                for worker in folder.glob("pid*-b"):
                    with suppress(ProcessLookupError):
                        os.kill(int(worker.name[3:-2]), end)
            assert second.finish(LIMIT).code != 0
        await_steps(folder, 3, WORKERS, first)
        (folder / "enough").touch()
        resumed = assert_resumed(first.finish(LIMIT), WORKERS, folder)
        assert_no_process_left(folder)
    # The number of ranks changed twice, and the last ranks resumed after the second change.
    runs = [(ranks, len(list(steps))) for ranks, steps in groupby(sizes(folder))]
    assert [ranks for ranks, _ in runs] == [WORKERS, 2 * WORKERS, WORKERS]
    assert resumed >= runs[0][1] + runs[1][1]
