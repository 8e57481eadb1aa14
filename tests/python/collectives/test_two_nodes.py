"""The benchmark of nodes works with one and two ranks on each of two nodes.

The benchmark itself checks that the bytes crossed the link.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.jobs import run
from harness.network import skip_unless_namespaces_work

pytestmark = [beyond_gloo, pytest.mark.full, pytest.mark.usefixtures("nothing_left")]


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return [line.split()[0] for line in listed.stdout.splitlines()]


@pytest.mark.parametrize("per_node", [1, 2])
def test_two_nodes(per_node: int, tmp_path: Path) -> None:
    skip_unless_namespaces_work()
    record = tmp_path / "nodes.json"
    job = [
        sys.executable,
        *("-m", "benchmarks.collectives.nodes"),
        "--mib=1",
        "--rounds=2",
        "--collective=all_reduce",
        "--rate=1gbit",
        f"--layout=2x{per_node}",
        f"--json={record}",
    ]
    finished = run(["sh", "-c", 'echo "process $$" && exec "$@"', "sh", *job])
    assert finished.code == 0, finished.output
    found = {one["contender"]: one for one in json.loads(record.read_text())["measurements"]}
    assert found["hbm"]["values"]["crossed_bytes"] >= 1 << 20
    process = re.match(r"process (\d+)\n", finished.output)
    assert process and not [name for name in namespaces() if name.startswith(f"hbm{process[1]}-")]
