"""HBMCOMM_BIND: the places of a group's ranks, as the log names them."""

from __future__ import annotations

import os
import re

import pytest
from harness import beyond_gloo
from harness.warm import run_warm

from torch_hbmcomm import memory

pytestmark = beyond_gloo

TWO_NODES = "Package:1 Group:2 [NUMANode] Core:1 PU:1"  # with a core each
RANKS = """
import os, tempfile
import torch.distributed as dist
cpus = {cpus}
file = tempfile.mktemp()
rank, child = 0, os.fork()
while child == 0 and rank + 2 < len(cpus):
    rank, child = rank + 1, os.fork()
if child == 0:
    rank += 1
if cpus[rank] is not None:
    os.sched_setaffinity(0, {{sorted(os.sched_getaffinity(0))[cpus[rank]]}})
dist.init_process_group("hbm", init_method=f"file://{{file}}", rank=rank, world_size=len(cpus))
dist.barrier()
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")


def placed(mode: str, cpus: tuple[int | None, ...] = (None, None), machine: str = "") -> list[str]:
    """Return the place of each rank, in the words of the log.

    cpus: for each rank, the index of the CPU that its launcher gave it; None: it may use all
    machine: an invented machine for hwloc; empty: this machine
    """
    environment = {"HBMCOMM_BIND": mode, "HBMCOMM_LOG": "info"}
    if machine:
        environment["HWLOC_SYNTHETIC"] = machine
    finished = run_warm(RANKS.format(cpus=cpus), 120, **environment)
    assert finished.code == 0, finished.output
    pattern = r"\[hbm rank (\d)\] info: ((?:not )?bound .*|left on .*)"
    found = dict(re.findall(pattern, finished.output))
    assert sorted(found) == [str(rank) for rank in range(len(cpus))], finished.output
    return [found[rank] for rank in sorted(found)]


def test_auto_gives_each_rank_a_node() -> None:
    assert placed("auto", machine=TWO_NODES) == [
        "bound to NUMA node 0 (CPUs 0)",
        "bound to NUMA node 1 (CPUs 1)",
    ]


@needs_two_cpus
def test_auto_leaves_a_rank_that_its_launcher_has_bound() -> None:
    for said in (*placed("auto", (0, 1)), *placed("auto", (0, None))):
        assert said.startswith("left on its own CPUs"), said


@needs_two_cpus
def test_auto_divides_cpus_among_the_ranks_that_may_use_them() -> None:
    """Two launchers may have a part of the machine each, as in two containers."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    said = placed("auto", (0, 1, 0, 1))
    assert [one.rpartition("(")[2] for one in said] == [f"CPUs {first})", f"CPUs {second})"] * 2
    assert all(one.startswith("bound to NUMA node") for one in said)


def test_ranks_that_are_not_bound_hear_of_auto_if_there_are_several_nodes() -> None:
    for said in placed("none", machine=TWO_NODES):
        assert "of 2: HBMCOMM_BIND=auto keeps a rank near its memory" in said
    for said in placed("none"):
        assert ("HBMCOMM_BIND=auto" in said) == (memory.info().cpu_nodes > 1)
