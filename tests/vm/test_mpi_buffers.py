"""Collectives use memory on the rank's own node: HBM, or DDR if the policy is ddr.

The tests check tensors, hbm's segments, and the buffers passed to MPI.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from guest import boot
from guest.ranks import COLLECTIVES, WHATS, Job, run
from guest.topology import TOPOLOGIES

pytestmark = [pytest.mark.vm, pytest.mark.full, pytest.mark.timeout(boot.LIMIT + 60)]

TENSOR = 4 << 20
# The least bytes of the buffers that a rank passes to MPI. They are fewer than the tensor's bytes,
# because hbm uses buffers again.
IN_FLIGHT = {"allreduce": TENSOR // 2, "broadcast": TENSOR // 4, "gather": TENSOR // 4}


@pytest.mark.parametrize(
    ("topology", "ranks", "policy"),
    [("hbm", 2, "preferred"), ("hbm", 2, "ddr"), ("snc4", 4, "bind")],
)
def test_memory_of_collectives(topology: str, ranks: int, policy: str, tmp_path: Path) -> None:
    (reports,) = run(topology, [Job(ranks, policy, "numa", TENSOR)], tmp_path)
    assert len(reports) == ranks * len(COLLECTIVES) * len(WHATS)
    machine = TOPOLOGIES[topology]
    for (collective, rank, what), report in reports.items():
        node = rank * machine.cpu_nodes // ranks
        expected = node if policy == "ddr" else machine.hbm_of(node)
        assert set(report.ours) == {expected}, report
        if what == "mpi":
            assert report.ours[expected] >= IN_FLIGHT[collective]
        else:
            assert report.ours[expected] >= TENSOR
        # Most pages of a segment have never been written, so they are on no node.
        assert report.agrees() or what == "segment", report
