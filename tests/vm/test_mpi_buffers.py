"""The buffers that are handed to MPI lie on HBM: each rank's on its own node."""

from __future__ import annotations

from pathlib import Path

import guest
import pytest
from report import parse_reports
from topology import TOPOLOGIES

pytestmark = [pytest.mark.vm, pytest.mark.full, pytest.mark.timeout(guest.LIMIT + 60)]

PAYLOAD = 2 << 20  # of the 4 MiB that each rank reduces and broadcasts, at least half is in flight


@pytest.mark.parametrize(
    ("topology", "ranks", "policy"),
    [("hbm", 2, "preferred"), ("hbm", 2, "ddr"), ("snc4", 4, "bind")],
)
def test_buffers_handed_to_mpi(topology: str, ranks: int, policy: str, tmp_path: Path) -> None:
    result = guest.run(
        topology,
        [guest.PROGRAMS / "vm_mpi_buffers"],
        tmp_path,
        environment={"VM_POLICY": policy, "VM_RANKS": str(ranks)},
    )
    reports = {report.name: report for report in parse_reports(result.stdout)}
    assert len(reports) == ranks
    machine = TOPOLOGIES[topology]
    for rank in range(ranks):
        report = reports[f"rank {rank}"]
        node = rank * machine.cpu_nodes // ranks
        expected = node if policy == "ddr" else machine.hbm_of(node)
        assert set(report.ours) == {expected}, report
        assert report.ours[expected] >= PAYLOAD
        assert report.agrees(), report
