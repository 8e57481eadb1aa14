"""Runs a module on ranks, on the host or in containers, and reads their results from a file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from papers.containers.podman import OUTPUT, Division, started

RESULTS = "results.json"
"""The name of the file that rank 0 writes, in the directory of the plan."""

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 1800  # seconds, for the ranks


def results_of(division: Division, ranks: int, module: str, plan: Mapping[str, Any]) -> Any:
    """Run `python -m MODULE PLAN.json` on each rank. Returns the content of RESULTS.

    Raises RuntimeError with the ranks' output if a rank fails, or if the ranks do not end in time.
    """
    # In /tmp, because the ranks' sockets are here too: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hbmcomm-", dir="/tmp") as name:
        folder = Path(name)
        file = folder / "plan.json"
        file.write_text(json.dumps(plan))
        command = [sys.executable, "-m", module, str(file)]
        settings = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        with started(division, ranks, command, folder, settings) as running:
            try:
                codes: list[int | None] = [process.wait(_LIMIT) for process in running]
            except subprocess.TimeoutExpired:
                codes = [process.poll() for process in running]
        if any(code != 0 for code in codes):
            output = (folder / OUTPUT).read_text()
            raise RuntimeError(f"{division}: the ranks ended with {codes}: {output}")
        return json.loads((folder / RESULTS).read_text())
