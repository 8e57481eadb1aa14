"""A worker of a parameter server as a process, under torchrun or by itself.

As a script it is that worker; its only argument is its Task as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from box_process import ROOT, TOKEN
from harness.jobs import BIN, environment


@dataclass
class Task:
    """options: ParameterServer's. result: the file in which the weights come to lie."""

    url: str
    transport: str
    worker: int
    workers: int
    steps: int
    pause: float  # seconds in each step
    result: str
    options: dict[str, Any] = field(default_factory=dict)


class WorkerProcess:
    """Killed when the `with` block ends, and its agent, torchrun, too."""

    def __init__(self, task: Task, agent: bool) -> None:
        launcher: list[Any] = [sys.executable]
        if agent:
            launcher = [BIN / "torchrun", "--standalone", "--nproc-per-node=1"]
        self._process = subprocess.Popen(
            [*launcher, __file__, json.dumps(asdict(task))],
            env=environment(PYTHONPATH=str(ROOT), HBMCOMM_TOKEN=TOKEN),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._worker = 0

    def until_step(self, step: int) -> None:
        """It has taken so many steps, and may go on."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            name, number = line.split()
            if name == "pid":
                self._worker = int(number)
            elif int(number) == step:
                return
        raise AssertionError(self._process.communicate()[1])

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """To the worker, not to its agent."""
        os.kill(self._worker, number)

    def finish(self, limit: float = 60) -> int:
        """Its exit status, which is its agent's."""
        self.errors = self._process.communicate(timeout=limit)[1]
        return self._process.returncode

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def work(task: Task) -> None:
    import torch
    from ps_task import backward, network, sgd

    from torch_hbmcomm import ParameterServer, smb

    model = network()
    with smb.connect(task.url, transport=task.transport) as box:  # type: ignore[arg-type]
        options = {"workers": task.workers, **task.options}
        with ParameterServer(model, sgd(model.parameters()), box=box, **options) as ps:
            print("pid", os.getpid(), flush=True)
            for step in range(task.steps):
                backward(model, step, task.worker, task.workers)
                ps.step()
                print("step", step + 1, flush=True)
                time.sleep(task.pause)
            ps.pull()
            torch.save({"model": model.state_dict(), "stats": ps.stats()}, Path(task.result))


if __name__ == "__main__":
    work(Task(**json.loads(sys.argv[1])))
