"""Peers: processes of a benchmark whose methods the parent process calls, one call at a time.

A call and its result are a line of JSON each, on a Unix socket. A waiting peer sleeps in the
kernel, so it takes no time from the measured process.
"""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any

_START_SECONDS = 180  # importing PyTorch may take long; a failed start is noticed earlier
_ANSWER_SECONDS = 180
_END_SECONDS = 10
_LEAVE_SECONDS = 2  # from the end of the connection until a peer ends, even if the peer waits


class PeerFailed(RuntimeError):
    """A peer did not start, ended early or gave no answer in time, or a called method raised."""


class Peer:
    """The parent's side of the connection to a peer."""

    def __init__(self, role: str, connection: socket.socket, log: Path):
        self._role = role
        self._log = log
        self._lines = connection.makefile("rw")

    def ask(self, method: str, /, **arguments: Any) -> Any:
        """Call the peer's method of that name, and return its result."""
        self.tell(method, **arguments)
        return self.answer()

    def tell(self, method: str, /, **arguments: Any) -> None:
        """Call a method whose result answer() fetches later."""
        try:
            self._lines.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._lines.flush()
        except OSError as error:
            raise self._failed(f"has ended: {error}") from error

    def answer(self) -> Any:
        try:
            line = self._lines.readline()
        except OSError as error:
            raise self._failed(f"gave no answer for {_ANSWER_SECONDS} s") from error
        if not line:
            raise self._failed("has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self._role}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """Close the connection, which ends the peer."""
        self._lines.close()

    def _failed(self, how: str) -> PeerFailed:
        return PeerFailed(f"{self._role} {how}{_tail(self._log)}")


@contextmanager
def peers(
    role: str,
    count: int = 1,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[list[Peer]]:
    """Start a command that runs `count` peers. Yields the peers in the order of their ranks. The
    peers end when the context ends.

    role: the module that they run.
    launcher: the words before the command, to run it in another namespace or as several ranks.
    arguments: the module's arguments, in sys.argv from 2 on.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hbmcomm-bench-")))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(directory / "s"))
        listener.listen(count)
        log = directory / "log"
        process = subprocess.Popen(
            [*launcher, sys.executable, "-m", role, str(directory / "s"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stack.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
            env=os.environ | dict(environment or {}),
        )
        stack.callback(_end, process)
        found: dict[int, Peer] = {}
        while len(found) < count:
            with _accepted(listener, process, role, log) as connection:
                connection.settimeout(_ANSWER_SECONDS)
                peer = stack.enter_context(closing(Peer(role, connection, log)))
            found[peer.answer()] = peer
        yield [found[rank] for rank in sorted(found)]


@contextmanager
def peer(role: str, launcher: Sequence[str] = (), arguments: Sequence[str] = ()) -> Iterator[Peer]:
    with peers(role, launcher=launcher, arguments=arguments) as found:
        yield found[0]


def _accepted(
    listener: socket.socket, process: subprocess.Popen[bytes], role: str, log: Path
) -> socket.socket:
    listener.settimeout(0.1)
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            return listener.accept()[0]
        except TimeoutError:
            if process.poll() is not None:
                raise PeerFailed(
                    f"{role} ended with {process.returncode} at its start{_tail(log)}"
                ) from None
    raise PeerFailed(f"{role} did not start in {_START_SECONDS} s{_tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process whose connection has ended. Kills it after _END_SECONDS."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return "".join(f"\n  {line}" for line in lines[-5:])


def obey(actor: object, rank: int = 0) -> None:
    """Be a peer: call the methods of `actor` as the parent asks, until it closes the connection.

    After _LEAVE_SECONDS more the process ends even if a method still runs, for example a method
    that waits for another peer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        threading.Thread(
            target=_end_after, args=(os.dup(connection.fileno()),), daemon=True
        ).start()
        lines = connection.makefile("rw")
        _send(lines, {"result": rank})
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"result": getattr(actor, request["method"])(**request["arguments"])}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            _send(lines, answer)


def _end_after(connection: int) -> None:
    """End this process _LEAVE_SECONDS after the other end of the connection was closed."""
    closed = select.poll()
    closed.register(connection, select.POLLRDHUP)
    closed.poll()
    time.sleep(_LEAVE_SECONDS)
    os._exit(1)


def _send(lines: IO[str], answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()
