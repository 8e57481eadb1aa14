"""The NUMA nodes of memory, as the kernel reports them, on machines with HBM."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from guest import boot
from guest.pages import Report, parse_reports
from guest.topology import TOPOLOGIES, Topology

pytestmark = [pytest.mark.vm, pytest.mark.full, pytest.mark.timeout(boot.LIMIT + 60)]

MIB = 1 << 20
SOURCES = ("heap", "pool", "segment", "staging")
HBM_POLICIES = ("preferred", "bind", "interleave")
POLICIES = (*HBM_POLICIES, "ddr")


def take(policy: str, cpu: int, block: int, total: int, *sources: str) -> str:
    """Return the command of a process on one CPU that allocates from one source after another."""
    # taskset binds the process before it starts, because libraries touch memory before main().
    program = shlex.quote(str(boot.PROGRAMS / "vm_placement"))
    return f"taskset -c {cpu} {program} {policy} {block} {total} {' '.join(sources)}"


def run(topology: str, script: Iterable[str], directory: Path) -> list[Report]:
    """Return the reports of a shell script's processes; none of them may fail or be killed."""
    # Without the names of the HBM nodes, memkind interleaves over the closest HBM node alone.
    nodes = ",".join(map(str, TOPOLOGIES[topology].hbm_nodes))
    several = TOPOLOGIES[topology].cpu_nodes > 1
    environment = {"MEMKIND_HBW_NODES": nodes} if several else {}
    command = ["sh", "-ec", "\n".join(script)]
    result = boot.run(topology, command, directory, environment=environment)
    assert result.oom_kills == []
    return parse_reports(result.stdout)


@dataclass(frozen=True)
class Placed:
    """Reports of the memory of processes.

    For each policy there is a process on each node with CPUs. It takes 8 MiB from each source.
    """

    machine: Topology
    reports: dict[tuple[str, int, str], Report]  # by policy, node and source

    BYTES = 8 * MIB


@pytest.fixture(scope="module", params=["hbm", "snc4", "hbm-only"])
def placed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Placed:
    machine = TOPOLOGIES[request.param]
    processes = list(product(POLICIES, range(machine.cpu_nodes)))
    script = [
        take(policy, node * machine.cpus_per_node, MIB, Placed.BYTES, *SOURCES)
        for policy, node in processes
    ]
    reports = run(request.param, script, tmp_path_factory.mktemp(request.param))
    keys = [(policy, node, source) for policy, node in processes for source in SOURCES]
    return Placed(machine, dict(zip(keys, reports, strict=True)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", SOURCES)
def test_memory_lies_where_the_policy_says(placed: Placed, policy: str, source: str) -> None:
    machine = placed.machine
    for node in range(machine.cpu_nodes):
        report = placed.reports[policy, node, source]
        assert report.name == source and report.refusal == ""
        assert report.bytes == Placed.BYTES
        assert report.agrees(), report
        if policy == "interleave":
            share = Placed.BYTES // len(machine.hbm_nodes)
            assert report.ours == pytest.approx(dict.fromkeys(machine.hbm_nodes, share), rel=0.1)
        else:
            expected = node if policy == "ddr" else machine.hbm_of(node)  # equal if all is HBM
            assert set(report.kernel) == {expected}, report


@pytest.mark.parametrize(
    ("topology", "mode"),
    [
        ("hbm", "flat"),
        ("snc4", "flat"),
        ("cache", "cache"),
        ("hybrid", "hybrid"),
        ("hbm-only", "hbm-only"),
    ],
)
def test_the_memory_mode_is_found(topology: str, mode: str, tmp_path: Path) -> None:
    result = boot.run(topology, [boot.PROGRAMS / "vm_placement", "mode"], tmp_path)
    assert result.stdout == f"{mode}\n"


MACHINE = TOPOLOGIES["hbm"]
DDR, HBM = 0, MACHINE.hbm_of(0)
SPILL = 32 * MIB  # more than HBM has
MORE_THAN_HBM = MACHINE.hbm_mib * MIB + SPILL
MOST = 0.6 * MACHINE.hbm_mib * MIB  # without the kernel's memory and the margin of room.h
BLOCK = 4 * MIB


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Report]:
    """Return the reports of processes that asked for more than HBM has, by policy and source."""
    keys = list(product(HBM_POLICIES, SOURCES))
    script = [take(policy, 0, BLOCK, MORE_THAN_HBM, source) for policy, source in keys]
    reports = run("hbm", script, tmp_path_factory.mktemp("full"))
    return dict(zip(keys, reports, strict=True))


@pytest.mark.parametrize("source", SOURCES)
def test_preferred_spills_when_hbm_is_full(
    full: dict[tuple[str, str], Report], source: str
) -> None:
    report = full["preferred", source]
    assert report.agrees(), report
    assert report.refusal == ""
    assert report.ours[HBM] > MOST and report.ours[DDR] >= SPILL


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("policy", ["bind", "interleave"])
def test_strict_policies_refuse_when_hbm_is_full(
    full: dict[tuple[str, str], Report], policy: str, source: str
) -> None:
    report = full[policy, source]
    assert report.agrees(), report
    assert f"HBM node {HBM} can give" in report.refusal
    assert report.ours[HBM] > MOST
    assert set(report.kernel) == {HBM}, "not a page spilled"


@pytest.mark.parametrize("policy", ["preferred", "bind"])
def test_two_processes_fill_hbm_at_once(policy: str, tmp_path: Path) -> None:
    half = MORE_THAN_HBM // 2
    script = [
        f"{take(policy, 0, BLOCK, half, 'segment')} >/tmp/first & first=$!",
        f"{take(policy, 1, BLOCK, half, 'segment')} >/tmp/second",
        "wait $first; cat /tmp/first /tmp/second",
    ]
    reports = run("hbm", script, tmp_path)
    assert sum(report.ours[HBM] for report in reports) > MOST
    for report in reports:
        assert report.agrees(), report
        if policy == "bind":
            assert set(report.kernel) == {HBM}, "not a page spilled"
