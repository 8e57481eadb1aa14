"""Native programs that repeat an operation and time it: benchmarks/native, built by `make bench`.

They read commands, a line of words each. They answer each with a line: "ok" and numbers, or "error"
and the cause.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.result import Unavailable
from torch_hbmcomm.bench.rounds import Timed

_ROOT = Path(__file__).resolve().parents[1]
_FOLDER = _ROOT / "build" / str(sys.implementation.cache_tag) / "bench"


def path(name: str) -> Path:
    return _FOLDER / name


def why_unavailable(name: str = "bounds") -> str | None:
    if path(name).exists():
        return None
    return f"the native program {name} is not in {_FOLDER}: run make bench"


class Conversation:
    """The connection to a native program. The program ends when the connection is closed."""

    def __init__(self, name: str, to: IO[str], of: IO[str]) -> None:
        self._name = name
        self._to = to
        self._of = of

    def ask(self, *words: object) -> list[float]:
        """Send a command, and return the numbers of the answer. Raises PeerFailed."""
        self.tell(*words)
        return self.answer()

    def tell(self, *words: object) -> None:
        """Send a command. answer() returns its answer."""
        try:
            self._to.write(" ".join(map(str, words)) + "\n")
            self._to.flush()
        except OSError as error:
            raise PeerFailed(f"{self._name} has ended: {error}") from error

    def answer(self) -> list[float]:
        line = self._of.readline()
        if not line.startswith("ok"):
            raise PeerFailed(f"{self._name}: {line.removeprefix('error ').strip() or 'has ended'}")
        return [float(word) for word in line.split()[1:]]

    def says(self, seconds: float) -> bool:
        """Return True if the program answers or ends within `seconds`. After its end, answer()
        raises PeerFailed."""
        return bool(select.select([self._of], [], [], max(seconds, 0.0))[0])

    def timed(self, *words: object) -> Timed:
        """Return a rounds.Timed: a loop that runs in the program.

        words: the first words of the command; the number of samples and the calls in each sample
        follow them.
        """
        return lambda samples, calls: self.ask(*words, samples, calls)

    def close(self) -> None:
        self._to.close()
        self._of.close()


class Program(Conversation):
    """A native program that runs until close() or the end of this process. Raises Unavailable."""

    def __init__(self, name: str, *arguments: object, launcher: Sequence[str] = ()) -> None:
        cause = why_unavailable(name)
        if cause is not None:
            raise Unavailable(cause)
        self._process = subprocess.Popen(
            [*launcher, str(path(name)), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        super().__init__(name, self._process.stdin, self._process.stdout)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        super().close()
        self._process.wait()


@contextmanager
def program(name: str, *arguments: object, launcher: Sequence[str] = ()) -> Iterator[Program]:
    running = Program(name, *arguments, launcher=launcher)
    try:
        yield running
    finally:
        running.close()
