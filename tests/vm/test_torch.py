"""Where tensors lie: those of memory.empty, and the buckets in which DDP reduces gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.guest import boot
from benchmarks.guest.pages import parse_reports
from benchmarks.guest.topology import TOPOLOGIES

pytestmark = [pytest.mark.vm, pytest.mark.full, pytest.mark.timeout(boot.LIMIT + 60)]

DDR, HBM = 0, TOPOLOGIES["hbm"].hbm_of(0)
EXPECTED = {
    "empty preferred": HBM,
    "empty bind": HBM,
    "empty interleave": HBM,
    "empty ddr": DDR,
    "bucket of step 0": HBM,
    "bucket of step 1": HBM,
}


# One test for all, because `import torch` takes the guest most of a minute.
def test_tensors_and_buckets(tmp_path: Path) -> None:
    program = Path(__file__).with_name("torch_tensors.py")
    environment = {"HBMCOMM_MEMORY": "bind"}
    command: list[str | Path] = [sys.executable, program]
    result = boot.run("hbm", command, tmp_path, environment=environment)
    assert result.oom_kills == []
    reports = parse_reports(result.stdout)
    assert [report.name for report in reports] == list(EXPECTED)
    for report in reports:
        assert set(report.ours) == {EXPECTED[report.name]}, report
        assert report.agrees(), report
