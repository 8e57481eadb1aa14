"""Jobs run as users run them: a script under torchrun, mpiexec or by itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import families, stuck
from harness.context import BACKEND
from harness.network import free_port

JOB_SCRIPT = Path(__file__).with_name("job_script.py")
BIN = Path(sys.executable).parent
# PyTorch's store looks up its peer's name, and tries IPv6 first, even for 127.0.0.1. It prints
# these warnings at each connection on a machine without a name server or without IPv6.
_WARNINGS_OF_THE_NETWORK = re.compile(
    r"^(\[rank\d+\]:)?\[W[^\n]* socket\.cpp:\d+\] \[c10d\] The "
    r"(hostname of the client socket cannot be retrieved|"
    r"(client|server) socket cannot be initialized[^\n]*\(errno: 97 )[^\n]*\n",
    re.MULTILINE,
)


@dataclass
class Finished:
    code: int
    output: str  # stdout and stderr together, without PyTorch's warnings of the network


def without_network_warnings(output: str) -> str:
    return _WARNINGS_OF_THE_NETWORK.sub("", output)


def environment(**extra: str) -> dict[str, str]:
    """Return this process's environment, prepared by surroundings.settle(), with `extra`."""
    return os.environ | {"HBMCOMM_TEST_BACKEND": BACKEND, "OMP_NUM_THREADS": "1"} | extra


class Job:
    """A running command, with all that it starts; killed when the `with` block ends."""

    def __init__(self, command: Sequence[str | Path], **extra: str) -> None:
        self._process = subprocess.Popen(
            [str(part) for part in command],
            env=environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        families.kill(self._process)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to the command, but not to the processes that it started."""
        self._process.send_signal(number)

    def finish(self, limit: float = 400) -> Finished:
        """Wait for the command's end. Raises AssertionError, with the output, after `limit` s."""
        try:
            output, _ = self._process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            state = stuck.note(self._process.pid)
            families.kill(self._process)
            output, _ = self._process.communicate()
            raise AssertionError(
                f"did not end within {limit} s; output:\n{output}\n{state}"
            ) from None
        return Finished(self._process.returncode, without_network_warnings(output))


def assert_done(finished: Finished, ranks: int) -> None:
    """Assert that the job script ended well on each of `ranks` ranks."""
    assert finished.code == 0, finished.output
    for rank in range(ranks):
        assert finished.output.count(f"rank {rank} of {ranks} done") == 1, finished.output


def run(command: Sequence[str | Path], limit: float = 400, **extra: str) -> Finished:
    with Job(command, **extra) as job:
        return job.finish(limit)


def run_code(code: str, limit: float = 400, **extra: str) -> Finished:
    return run([sys.executable, "-c", code], limit, **extra)


def torchrun(ranks: int, *arguments: str) -> list[str | Path]:
    """Return the command that runs the job script with `ranks` ranks on this machine."""
    return [BIN / "torchrun", "--standalone", f"--nproc-per-node={ranks}", JOB_SCRIPT, *arguments]


def by_hand(ranks: int, *arguments: str) -> list[str | Path]:
    """Return the command that runs the job script without a launcher, which starts faster."""
    shell = f"""
export WORLD_SIZE={ranks} MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}
rank=0
while [ $rank -lt {ranks} ]; do
  RANK=$rank LOCAL_RANK=$rank "$@" & started="$started $!"
  rank=$((rank + 1))
done
for rank in $started; do wait $rank || code=$?; done
exit ${{code:-0}}
"""
    return ["sh", "-c", shell, "sh", sys.executable, JOB_SCRIPT, *arguments]


def mpiexec(ranks: int, *arguments: str) -> list[str | Path]:
    return [BIN / "mpiexec", "-n", str(ranks), sys.executable, JOB_SCRIPT, *arguments]
