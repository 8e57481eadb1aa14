"""The contender iperf3, if it is installed."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.rounds import Timed
from torch_hbmcomm.sizes import MIB

_BUSY_SECONDS = 10
_HOST = "127.0.0.1"
_LEAST_BYTES = 256 * MIB


def available() -> bool:
    return shutil.which("iperf3") is not None


class Iperf:
    def __init__(self, port: int):
        self._port = port

    def timed(self, operation: str, size: int, lanes: int) -> Timed:
        """Return a loop that runs iperf3 once for all calls of a turn, and returns one sample.

        iperf3 transfers at least _LEAST_BYTES: with less data, its start-up would dominate the rate
        that it reports.
        """

        def run(samples: int, calls: int) -> list[float]:
            moved = max(size * samples * calls, _LEAST_BYTES)
            command = ["iperf3", "-J", "-c", _HOST, "-p", str(self._port), "-P", str(lanes)]
            direction = ["-R"] if operation == "read" else []
            report = _report([*command, "-n", str(moved), *direction])
            return [float(size * 8e6 / report["end"]["sum_received"]["bits_per_second"])]

        return run


def _report(command: Sequence[str]) -> dict[str, Any]:
    """Run a client of iperf3, and return its report.

    Retries for _BUSY_SECONDS, because the server does not listen between two tests.
    """
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        done = subprocess.run(command, capture_output=True, text=True)
        report: dict[str, Any] = json.loads(done.stdout)
        if "error" not in report:
            return report
        if time.monotonic() > deadline:
            raise PeerFailed(f"iperf3: {report['error']}")
        time.sleep(0.02)


@contextmanager
def server() -> Iterator[Iperf]:
    with socket.create_server((_HOST, 0)) as probe:
        port = probe.getsockname()[1]
    command = ["iperf3", "-s", "-B", _HOST, "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Iperf(port)
    finally:
        process.terminate()
        process.wait()
