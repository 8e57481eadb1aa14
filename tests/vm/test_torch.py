"""The tests that need PyTorch, in one guest because PyTorch's import takes minutes there.

They test the nodes of tensors, and the asynchronous parameter server over RDMA.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from guest import boot, verbs
from guest.pages import parse_reports
from guest.topology import TOPOLOGIES

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


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of each program, by its name."""
    program = Path(__file__).with_name("torch_programs.py")
    output = verbs.run([sys.executable, program], tmp_path_factory.mktemp("torch"))
    parts = output.split("--- ")[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def test_tensors_and_buckets(outputs: dict[str, str]) -> None:
    """Check the tensors of memory.empty, and the buckets in which DDP reduces gradients."""
    reports = parse_reports(outputs["torch_tensors"])
    assert [report.name for report in reports] == list(EXPECTED)
    for report in reports:
        assert set(report.ours) == {EXPECTED[report.name]}, report
        assert report.agrees(), report


def test_two_workers_train(outputs: dict[str, str]) -> None:
    output = outputs["parameter_server_training"]
    assert sorted(output.splitlines()) == [f"worker {i} agrees over verbs" for i in range(2)]
