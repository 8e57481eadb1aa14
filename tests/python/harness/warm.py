"""Runs programs as `python -c` does, but forks them from a process that has imported PyTorch.

`import torch` takes most of the time of a short program. So each process that runs tests keeps a
server (warm_server.py) that has imported PyTorch without its plug-ins. The server forks a child for
a program. The child takes the program's environment, loads the plug-ins as the end of `import
torch` does, runs the code as __main__, and ends by the interpreter's own shutdown.

Programs about `import torch` itself, or about a variable that Python reads at its start, need
jobs.run_code().
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import families, jobs, stuck

_SERVER = Path(__file__).with_name("warm_server.py")
_running: list[subprocess.Popen[str]] = []  # at most one; it ends with this process


def run_warm(code: str, limit: float = 400, **extra: str) -> jobs.Finished:
    """Run a program, and wait for its end. Raises AssertionError, with the output, after `limit` s.

    Used from one thread.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        environment = jobs.environment(**extra)
        program = {"code": code, "environment": environment, "output": output.name}
        server.stdin.write(json.dumps(program) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], limit)[0]:
            state = stuck.note(server.pid)
            families.kill(_running.pop())
            raise AssertionError(f"did not end within {limit} s; output:\n{output.read()}\n{state}")
        answer = server.stdout.readline()
        if not answer:
            families.kill(_running.pop())
            raise AssertionError(f"the server of programs has ended; output:\n{output.read()}")
        return jobs.Finished(int(answer), jobs.without_network_warnings(output.read()))


def _server() -> subprocess.Popen[str]:
    if not _running:
        _running.append(
            subprocess.Popen(
                [sys.executable, str(_SERVER)],
                env=jobs.environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    return _running[0]
