"""`python -m benchmarks.read_process`, with few rounds."""

import re
import sys

from harness.jobs import run


def test_measures_every_size() -> None:
    finished = run([sys.executable, "-m", "benchmarks.read_process", "--rounds", "2"])
    assert finished.code == 0, finished.output
    rows = re.findall(r"(\d+) KiB((?: +│ +[\d.]+ µs \([\d.]+\)){3})", finished.output)
    assert [int(size) for size, _ in rows] == [16, 64, 256, 1024, 16384], finished.output
