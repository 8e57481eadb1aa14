"""A memory box in a process of its own, which outlives the process that has started it.

torch_hbmcomm/box_server.py is the program of that process, and describes its life.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch_hbmcomm.variables import settings, unknown

_UNIX = "smb+unix://"


class BoxProcess:
    """The starter's end of the process: its addresses, and the wait for its end.

    The process serves its box until leave() was called, or this process has died, and no client is
    left.

    The token reaches the process through a pipe, so neither its command line nor its environment
    has the token.

    Threads: one at a time.

    Args:
        server: arguments of smb.Server that JSON can hold

    Raises RuntimeError if there is no Python program to start, and OSError if it cannot be started.
    """

    def __init__(self, **server: Any) -> None:
        if not sys.executable:  # a program embeds Python
            raise RuntimeError(
                'parameter_server="auto" starts a process of Python, and sys.executable does not '
                "name the program: set it, or start `hbmcomm serve` and pass its address"
            )
        self._input, self._output = -1, -1
        self._unread = b""
        self._ended = False
        self._urls: list[str] = []
        self.pid = 0  # of the process; 0: ready() has not returned
        self.clients = 0  # connected clients, as far as wait() has read
        try:
            self._start(json.dumps(server).encode() + b"\n")
        except BaseException:
            self.close()
            raise

    def _start(self, request: bytes) -> None:
        try:
            starter = os.pidfd_open(os.getpid())
        except OSError:  # a sandbox forbids it; then the end of the pipe shows this process' death
            starter = -1
        package = str(Path(__file__).resolve().parent)
        server = f"{package}/box_server.py"
        program = [sys.executable, "-I", "-S", server, package, str(starter)]
        wrong = unknown(settings(os.environ))  # this process has warned of them
        try:
            with subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={name: text for name, text in os.environ.items() if name not in wrong},
                pass_fds=[starter] if starter >= 0 else [],
                start_new_session=True,
            ) as launcher:
                assert launcher.stdin is not None and launcher.stdout is not None
                self._input = os.dup(launcher.stdin.fileno())
                self._output = os.dup(launcher.stdout.fileno())
                with suppress(BrokenPipeError):  # ready() finds the end
                    launcher.stdin.write(request)
        finally:
            if starter >= 0:
                os.close(starter)

    def ready(self, timeout: float) -> list[str]:
        """Wait until the box is served, at most `timeout` seconds. Returns its addresses, the Unix
        socket last.

        Raises an error of smb.Server, TimeoutError, or RuntimeError if the process has ended.
        """
        line = self._line(time.monotonic() + timeout)
        if line is None:
            raise TimeoutError(
                f"the process of the group's memory box has not started within {timeout:g} s, the "
                "group's timeout: this machine may be overloaded"
            )
        if not line:
            raise RuntimeError(
                "the process of the group's memory box ended before it served the box; its last "
                "output on standard error has the cause"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise getattr(builtins, answer["error"], RuntimeError)(answer["text"])
        self._urls, self.pid = answer["urls"], answer["pid"]
        return self._urls

    def leave(self) -> None:
        """Tell the process that this one uses the box no longer, after all clients here have
        closed."""
        with suppress(BrokenPipeError):  # the process has ended
            os.write(self._input, b"\n")

    def wait(self, timeout: float) -> bool:
        """Wait for the end of the process, at most `timeout` seconds. Returns True if it has ended.

        REQUIRES: leave() was called.
        """
        deadline = time.monotonic() + timeout
        while not self._ended and (line := self._line(deadline)) is not None:
            self._ended = not line
            self.clients = int(line or 0)
        return self._ended

    def close(self) -> None:
        """Release the connection to the process, which continues if it has clients. If the
        process was killed, remove the file of its Unix socket."""
        for descriptor in (self._input, self._output):
            if descriptor >= 0:
                os.close(descriptor)
        self._input = self._output = -1
        for url in self._urls if self._ended else ():
            if url.startswith(_UNIX):
                Path(url.removeprefix(_UNIX)).unlink(missing_ok=True)

    def _line(self, deadline: float) -> bytes | None:
        """Return the next line of the process without its end, b"" once the process has ended, or
        None at the deadline."""
        output = select.poll()  # select() refuses descriptors above 1,023
        output.register(self._output, select.POLLIN)
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not output.poll(math.ceil(left * 1000)):
                return None
            some = os.read(self._output, 4096)
            if not some:
                return b""
            self._unread += some
        line, _, self._unread = self._unread.partition(b"\n")
        return line
