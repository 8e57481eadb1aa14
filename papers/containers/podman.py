"""Ranks of one group, divided over containers that podman runs on this machine.

A container uses the host's root file system, and its changes to it are discarded. It has its own
/dev/shm, namespaces and seccomp filter. All containers share one directory.

REQUIRES: root, podman and runc.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

PODMAN = ("podman", "--cgroup-manager=cgroupfs", "--runtime=runc")
LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
_HOST_ROOT = ("--rootfs", "/:O")  # writes go to an overlay

OUTPUT = "output"

# A shell script that runs ranks. Its arguments: the first rank, the number of ranks, a file, then
# the ranks' command. The script writes the status of a failed rank to the file (0: none failed).
_RANKS = """
first=$1 count=$2 ended=$3
shift 3
for local in $(seq 0 $((count - 1))); do
  RANK=$((first + local)) LOCAL_RANK=$local "$@" &
  started="$started $!"
done
status=0
for rank in $started; do wait $rank || status=$?; done
echo $status > $ended.new && mv $ended.new $ended
exit $status
"""
_REMOVAL = 60  # seconds


class Part:
    """The ranks of one container, or the ranks on the host.

    A file reports the end of the ranks, because podman may run for minutes after its container has
    ended.
    """

    def __init__(
        self, command: Sequence[str], ended: Path, output: IO[str], environment: Mapping[str, str]
    ) -> None:
        self._ended = ended
        self._process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )

    def poll(self) -> int | None:
        """Return the status of a failed rank, 0 if none failed, None while the ranks run."""
        over = self._process.poll()
        return int(self._ended.read_text()) if self._ended.exists() else over

    def wait(self, limit: float) -> int:
        """Wait for the status. Raises subprocess.TimeoutExpired after `limit` seconds."""
        deadline = time.monotonic() + limit
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._process.args, limit)
            time.sleep(0.02)
        return status

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@dataclass(frozen=True)
class Division:
    """A division of a group's ranks.

    containers: number of containers; each has the same number of consecutive ranks. 0: no
    containers.
    meeting: True: the containers share HBMCOMM_SOCKET_DIR and have no network, so they form one
        node. False: they have podman's bridge, and each container is a node.
    """

    containers: int
    meeting: bool = True

    def __str__(self) -> str:
        if self.containers == 0:
            return "host"
        plural = "s" if self.containers > 1 else ""
        return f"{self.containers} container{plural}{'' if self.meeting else ' apart'}"


@cache
def why_unavailable() -> str | None:
    """Return the cause if this machine cannot run containers, or None."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("podman", "runc"))):
        return "containers need root, podman and runc"
    tried = subprocess.run(
        [*PODMAN, "run", "--rm", "--network=none", *LIMITS, *_HOST_ROOT, "true"],
        capture_output=True,
        text=True,
    )
    return f"podman runs no container here: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def started(
    division: Division,
    ranks: int,
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
) -> Iterator[list[Part]]:
    """Start `ranks` ranks.

    Each rank runs `command` with RANK, LOCAL_RANK, WORLD_SIZE and `environment` in its environment.

    Yields the ranks of each container. The end of the block kills all ranks, and removes the
    containers.

    folder: an empty directory, at the same path in all containers. The ranks write to `OUTPUT`
    there.
    """
    parts = max(division.containers, 1)
    each, left = divmod(ranks, parts)
    if left:
        raise ValueError(f"{ranks} ranks cannot be divided equally over {parts} containers")
    settings = {**environment, "WORLD_SIZE": str(ranks)}
    if division.containers and division.meeting:
        settings["HBMCOMM_SOCKET_DIR"] = str(folder)
    with ExitStack() as stack:
        output = stack.enter_context((folder / OUTPUT).open("a"))
        running: list[Part] = []
        for part in range(parts):
            ended = folder / f"ended-{part}"
            job = ["sh", "-c", _RANKS, "sh", str(part * each), str(each), str(ended), *command]
            if division.containers:
                name = f"{folder.name}-{part}"
                stack.callback(_podman, "rm", "--force", "--ignore", "--time=0", name)
                job = [*_entering(name, division.meeting, folder, settings), *job]
            running.append(Part(job, ended, output, {**os.environ, **settings}))
            stack.callback(running[-1].end)
        yield running


def _entering(name: str, meeting: bool, folder: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Yield the words to put before a command so that podman runs it in a container."""
    yield from (*PODMAN, "run", "--rm", f"--name={name}", *LIMITS)
    yield f"--network={'none' if meeting else 'podman'}"
    yield f"--volume={folder}:{folder}"
    yield f"--workdir={Path.cwd()}"
    yield from (f"--env={key}={value}" for key, value in settings.items())
    yield from _HOST_ROOT


def _podman(*arguments: str) -> None:
    subprocess.run([*PODMAN, *arguments], stdout=subprocess.DEVNULL, timeout=_REMOVAL)
