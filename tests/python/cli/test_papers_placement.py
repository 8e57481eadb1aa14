"""papers.placement: the shares in its report, and the virtual machines that it boots."""

from __future__ import annotations

from itertools import product

import pytest
from guest.pages import Report
from guest.ranks import COLLECTIVES, WHATS, Job, Reports
from guest.topology import TOPOLOGIES

from papers.placement.__main__ import BINDINGS, CLUSTERS, POLICIES, shares
from papers.report.placement import MEMORY_MODES, PLACEMENT, paper
from torch_hbmcomm.bench.result import Measurement, Result

SNC4 = TOPOLOGIES["snc4"]


def reports(nodes: dict[int, dict[int, int]]) -> Reports:
    """Return equal reports for all collectives. nodes: rank -> node -> bytes."""
    return {
        (collective, rank, what): Report("", sum(there.values()), "", there, there)
        for rank, there in nodes.items()
        for collective, what in product(COLLECTIVES, WHATS)
    }


@pytest.mark.parametrize(
    ("memory", "bind", "nodes", "share", "own"),
    [
        ("HBM", "numa", {0: {4: 8}, 1: {5: 8}, 2: {6: 8}, 3: {7: 8}}, 1, 1),
        ("HBM", "numa", {0: {4: 8}, 1: {4: 8}, 2: {6: 6, 2: 2}, 3: {7: 8}}, 30 / 32, 22 / 32),
        ("DDR", "numa", {0: {0: 8}, 1: {1: 8}, 2: {2: 8}, 3: {7: 8}}, 24 / 32, 24 / 32),
        ("HBM", "none", {0: {4: 8}, 1: {4: 8}, 2: {4: 8}, 3: {4: 8}}, 1, None),
    ],
)
def test_shares(
    memory: str, bind: str, nodes: dict[int, dict[int, int]], share: float, own: float | None
) -> None:
    job = Job(4, POLICIES[memory], bind, 8)
    found = shares(reports(nodes), SNC4, memory, job)
    assert [(one.of["collective"], one.contender) for one in found] == list(
        product(COLLECTIVES, WHATS)
    )
    for one in found:
        assert one.values == {"bytes": 32, "share": share} | (
            {} if own is None else {"own_share": own}
        )


def test_each_cell_is_compared_with_the_papers() -> None:
    assert paper("quadrant", "host", "HBM", "gather") == "0.301 s"
    assert paper("SNC-4", "4 containers", "HBM", "allreduce") == "5.361 s"
    assert paper("quadrant", "4 containers", "DDR", "broadcast").startswith("202 % of MCDRAM's")
    for cell in product(CLUSTERS, BINDINGS, POLICIES, COLLECTIVES):
        assert paper(*cell)


def test_a_line_has_each_memory_kinds_share() -> None:
    of = {"cluster": "SNC-4", "place": "host", "memory": "HBM", "collective": "gather"}
    found = [
        Measurement(of, what, values={"bytes": 1 << 20, "share": 0.25 * (1 + index)})
        for index, what in enumerate(WHATS)
    ]
    result = Result("placement", {}, {}, measurements=found)
    (row,) = PLACEMENT.table({"placement": result}).rows
    assert row[4:] == ["1 MiB: 25.0%", "1 MiB: 50.0%", "1 MiB: 75.0%", "-, -, -", "0.297 s"]


def test_modes_match_info() -> None:
    of = {"guest": "cache", "mode": "cache", "found_by": "hwloc"}
    found = [Measurement(of, "hbmcomm info", values={"nodes": 1, "hbm_nodes": 0})]
    result = Result("placement", {}, {}, measurements=found)
    (row,) = MEMORY_MODES.table({"memory-modes": result}).rows
    assert row == ["cache", "cache", "1", "0", "hwloc"]


@pytest.mark.parametrize(
    ("name", "nodes", "caches"), [("hbm", 2, 0), ("snc4", 8, 0), ("cache", 1, 1), ("hybrid", 2, 1)]
)
def test_machines_have_the_nodes_and_caches_of_their_mode(
    name: str, nodes: int, caches: int
) -> None:
    arguments = TOPOLOGIES[name].arguments()
    assert sum(one.startswith("node,") for one in arguments) == nodes
    assert sum(one.startswith("hmat-cache,") for one in arguments) == caches
