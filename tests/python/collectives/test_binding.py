"""HBMCOMM_BIND: where the ranks of a group run, and what the log says of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.warm import run_warm

pytestmark = beyond_gloo

TWO_NODES = "Package:1 Group:2 [NUMANode] Core:1 PU:1"  # with a core each
RANKS = """
import os, tempfile
import torch.distributed as dist
file = tempfile.mktemp()
child = os.fork()
rank = int(child != 0)
if rank in {bound}:
    os.sched_setaffinity(0, {{sorted(os.sched_getaffinity(0))[rank]}})
dist.init_process_group("hbm", init_method=f"file://{{file}}", rank=rank, world_size=2)
dist.barrier()
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")


def placed(mode: str, machine: str = "", bound: tuple[int, ...] = ()) -> list[str]:
    """Return what the log says of each rank's place.

    machine: what hwloc shows instead of this machine; empty: this machine
    bound: ranks that a launcher has bound to a CPU each
    """
    environment = {"HBMCOMM_BIND": mode, "HBMCOMM_LOG": "info"}
    if machine:
        environment["HWLOC_SYNTHETIC"] = machine
    finished = run_warm(RANKS.format(bound=bound), 120, **environment)
    assert finished.code == 0, finished.output
    pattern = r"\[hbm rank (\d)\] info: ((?:not )?bound .*|left on .*)"
    found = dict(re.findall(pattern, finished.output))
    assert sorted(found) == ["0", "1"], finished.output
    return [found["0"], found["1"]]


def test_auto_gives_each_rank_a_node() -> None:
    assert placed("auto", TWO_NODES) == [
        "bound to NUMA node 0 (CPUs 0)",
        "bound to NUMA node 1 (CPUs 1)",
    ]


@needs_two_cpus
def test_auto_leaves_ranks_that_the_launcher_has_bound() -> None:
    assert all(said.startswith("left on the CPUs") for said in placed("auto", bound=(0, 1)))
    first, second = placed("auto", bound=(0,))
    assert first.startswith("left on the CPUs")
    assert second.startswith("bound to NUMA node")


def test_ranks_that_are_not_bound_hear_of_auto_if_there_are_several_nodes() -> None:
    for said in placed("none", TWO_NODES):
        assert "of 2: HBMCOMM_BIND=auto keeps a rank near its memory" in said
    nodes = Path("/sys/devices/system/node").glob("node*/cpulist")
    several = sum(bool(cpus.read_text().strip()) for cpus in nodes) > 1
    for said in placed("none"):
        assert ("HBMCOMM_BIND=auto" in said) == several
