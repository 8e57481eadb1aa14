"""A worker of a parameter server as a process: under torchrun, or forked from the warm process.

Run as a script, this module is that worker. Its only argument is the Task as JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import families
from harness.box_process import ROOT, TOKEN
from harness.jobs import BIN, environment
from harness.pool import processes

LIMIT = 200.0  # seconds; starting PyTorch twice takes a minute on a very busy machine


@dataclass
class Task:
    """A worker's task.

    options: the options of ParameterServer
    result: the file of the weights; ".steps" and ".log" next to it have the steps and the output
    cells: True: the task trains Cells
    """

    url: str
    transport: str
    worker: int
    workers: int
    steps: int
    pause: float  # seconds in each step
    result: str
    options: dict[str, Any] = field(default_factory=dict)
    cells: bool = False


class WorkerProcess(ABC):
    """A worker's process. The end of the `with` block kills it and all that it has started."""

    def __init__(self, task: Task) -> None:
        self._steps, self._log = Path(f"{task.result}.steps"), Path(f"{task.result}.log")

    @property
    @abstractmethod
    def running(self) -> bool:
        """Return True if the process has not ended."""

    @abstractmethod
    def finish(self, limit: float = LIMIT) -> int:
        """Wait until it ends, at most `limit` seconds. Returns its exit status."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it, with all that it has started."""

    @property
    def errors(self) -> str:
        """Return the output of the process so far; "" while it has not opened its log."""
        if not self._log.exists():
            return ""
        return self._log.read_text(errors="replace")

    def until_step(self, step: int) -> None:
        """Wait until the process has taken `step` steps. It may continue."""
        deadline = time.monotonic() + LIMIT
        while not self._has_taken(step):
            if not self.running:  # the process may have taken the step and left in between
                assert self._has_taken(step), self.errors
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.01)

    def _has_taken(self, step: int) -> bool:
        return f"step {step}\n" in self._reported()

    @property
    def steps(self) -> int:
        """The number of steps that the worker reported. A killed worker may have taken one more."""
        return self._reported().count("step ")

    def signal(self, number: int) -> None:
        """Signal the worker, not its agent. REQUIRES: until_step() has returned."""
        pid = re.match(r"pid (\d+)\n", self._reported())
        assert pid is not None
        os.kill(int(pid[1]), number)

    def _reported(self) -> str:
        return self._steps.read_text() if self._steps.exists() else ""

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


class ForkedWorker(WorkerProcess):
    """A worker forked from the warm process, which has imported PyTorch."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._process = processes.Process(target=_work_in_fork, args=(task, self._log))
        self._process.start()

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def finish(self, limit: float = LIMIT) -> int:
        self._process.join(limit)
        assert self._process.exitcode is not None, f"it did not end in {limit} s"
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class AgentsWorker(WorkerProcess):
    """A worker under its own torchrun, whose exit status finish() returns."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        launcher: list[Any] = [BIN / "torchrun", "--standalone", "--nproc-per-node=1"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*launcher, "-m", "harness.ps_process", json.dumps(asdict(task))],
                env=environment(
                    PYTHONPATH=f"{ROOT}:{ROOT / 'tests' / 'python'}", HBMCOMM_TOKEN=TOKEN
                ),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def finish(self, limit: float = LIMIT) -> int:
        return self._process.wait(limit)

    def kill(self) -> None:
        families.kill(self._process)


def work(task: Task) -> None:
    import torch

    from harness.ps_models import Cells
    from harness.ps_task import backward, network, sgd
    from torch_hbmcomm import ParameterServer, smb
    from torch_hbmcomm.parameter_server import Downpour

    model: torch.nn.Module = Cells(task.workers) if task.cells else network()
    optimizer = sgd(model.parameters())
    if task.cells:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with (
        open(f"{task.result}.steps", "w", buffering=1) as report,
        smb.connect(task.url, transport=task.transport) as box,  # type: ignore[arg-type]
    ):
        options: dict[str, Any] = {"workers": task.workers, **task.options}
        if task.cells:
            options["rule"] = Downpour("sum")
        with ParameterServer(model, optimizer, box=box, **options) as ps:
            print("pid", os.getpid(), file=report)
            for step in range(task.steps):
                if isinstance(model, Cells):
                    model.add_one(task.worker)
                else:
                    backward(model, step, task.worker, task.workers)
                ps.step()
                print("step", step + 1, file=report)
                time.sleep(task.pause)
            ps.pull()
            torch.save({"model": model.state_dict(), "stats": ps.stats()}, Path(task.result))


def _work_in_fork(task: Task, log: Path) -> None:
    import torch

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["HBMCOMM_TOKEN"] = TOKEN
    torch.set_num_threads(1)
    work(task)


if __name__ == "__main__":
    work(Task(**json.loads(sys.argv[1])))
