"""A memory box as a process of its own, which tests may kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from harness.network import free_port

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a token for tests"


class BoxProcess:
    """A process of `hbmcomm serve`. After kill(), start() starts another at the same port.

    launcher: words to put before the command, for example to run it in a network namespace.
    """

    def __init__(
        self,
        *options: str,
        port: int | None = None,
        host: str = "127.0.0.1",
        launcher: Sequence[str] = (),
    ) -> None:
        self.port = port or free_port()
        self.options = options
        self.host = host
        self.launcher = launcher
        self.start()

    def start(self) -> None:
        command = [*self.launcher, sys.executable, "-m", "torch_hbmcomm.cli", "serve"]
        command += ["--listen", f"{self.host}:{self.port}", *self.options]
        environ = os.environ | {
            "PYTHONPATH": str(ROOT),
            "HBMCOMM_TOKEN": TOKEN,
            "HBMCOMM_LOG": "error",
        }
        self.process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.introduction = []
        for line in self.process.stdout:
            self.introduction.append(line.strip())
            if line.startswith("transports:"):
                break
        else:
            raise AssertionError(self.process.communicate()[1])
        self.url = self.introduction[0]

    def stop(self) -> None:
        """Send SIGSTOP, and wait until all threads of the box have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while not all(_is_stopped(task) for task in tasks.iterdir()):
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        # A later box would remove this socket only once it is older than a minute.
        for url in self.introduction:
            if url.startswith("smb+unix://"):
                Path(url.removeprefix("smb+unix://")).unlink(missing_ok=True)

    def terminate(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=20)
        return self.process.returncode

    def __enter__(self) -> BoxProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.kill()


def _is_stopped(task: Path) -> bool:
    """Return True if the thread of /proc/PID/task/TID is stopped, or has ended."""
    try:
        return ") T " in (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
