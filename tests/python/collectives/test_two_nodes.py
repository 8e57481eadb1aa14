"""The benchmark of two nodes works; it checks by itself that the bytes crossed the link."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from harness import beyond_gloo
from harness.jobs import run
from harness.network import skip_unless_namespaces_work

pytestmark = [beyond_gloo, pytest.mark.full, pytest.mark.usefixtures("nothing_left")]


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return [line.split()[0] for line in listed.stdout.splitlines()]


@pytest.mark.parametrize("per_node", [1, 2])
def test_two_nodes(per_node: int) -> None:
    skip_unless_namespaces_work()
    job = [
        sys.executable,
        *("-m", "benchmarks.collectives.two_nodes"),
        "--mib=1",
        "--rounds=2",
        f"--ranks={per_node}",
    ]
    finished = run(["sh", "-c", 'echo "process $$" && exec "$@"', "sh", *job])
    assert finished.code == 0, finished.output
    row = re.search(r"1 MiB .* ms .* ms .* ms .* ([\d.]+) MiB", finished.output)
    assert row and float(row[1]) >= 1, finished.output
    process = re.match(r"process (\d+)\n", finished.output)
    assert process and not [name for name in namespaces() if name.startswith(f"hbm{process[1]}-")]
