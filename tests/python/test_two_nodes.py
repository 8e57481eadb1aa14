"""The benchmark of two nodes works; it checks by itself that the bytes crossed the link."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.jobs import run
from test_examples import skip_unless_namespaces_work

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

TWO_NODES = Path(__file__).resolve().parents[2] / "benchmarks" / "two_nodes.py"


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


@pytest.mark.parametrize("per_node", [1, 2])
def test_two_nodes(per_node: int) -> None:
    skip_unless_namespaces_work()
    before = namespaces()
    finished = run([sys.executable, TWO_NODES, "--mib=1", "--rounds=2", f"--ranks={per_node}"])
    assert finished.code == 0, finished.output
    row = re.search(r"1 MiB .* ms .* ms .* ms .* ([\d.]+) MiB", finished.output)
    assert row and float(row[1]) >= 1, finished.output
    assert namespaces() <= before
