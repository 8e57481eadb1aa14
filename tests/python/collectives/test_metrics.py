"""HBMCOMM_METRICS: the counters that each rank writes for Prometheus."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.jobs import Job
from prometheus_client.parser import text_string_to_metric_families

from torch_hbmcomm.profiling import ranks

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

Labels = frozenset[tuple[str, str]]


def counters(folder: Path, rank: int) -> dict[str, dict[Labels, float]]:
    """Return the samples of each counter by their labels, which all name the rank."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(
        (folder / f"hbmcomm-rank-{rank}.prom").read_text()
    ):
        assert family.type == "counter"
        samples = found.setdefault(family.name.removeprefix("hbmcomm_operation_"), {})
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("rank") == str(rank)
            samples[frozenset(labels.items())] = sample.value
    return found


def labelled(**labels: str) -> Labels:
    return frozenset(labels.items())


# Rank 1 issues the first collective after rank 0 has begun it.
PROGRAM = """
import os, sys, torch
import torch.distributed as dist
import torch_hbmcomm as hbmcomm
from torch_hbmcomm.profiling import metrics
metrics.PERIOD, metrics.PATIENCE = 0.01, 300
folder, rank = os.environ["HBMCOMM_METRICS"], os.environ["RANK"]
store = "file://" + os.environ["STORE"]  # of no rank, so the ranks may end at any time
dist.init_process_group("hbm", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
store = dist.distributed_c10d._get_default_store()
if rank == "0":
    work = dist.all_reduce(torch.ones(10), async_op=True)
    store.set("begun", "")
    work.wait()
else:
    store.wait(["begun"])
    dist.all_reduce(torch.ones(10))
while not os.path.exists(f"{folder}/hbmcomm-rank-{rank}.prom"):
    os.sched_yield()
with hbmcomm.profile(f"{folder}/part"):
    dist.broadcast(torch.ones(100_000), 0)
data = hbmcomm.memory.empty((100_000,)).fill_(1)
dist.broadcast(data, 0)
dist.destroy_process_group()
"""


def run_program(folder: Path, nodes: list[str]) -> None:
    jobs = [
        Job(
            [sys.executable, "-c", PROGRAM],
            RANK=str(rank),
            STORE=str(folder / "store"),
            HBMCOMM_NODE_ID=node,
            HBMCOMM_METRICS=str(folder),
        )
        for rank, node in enumerate(nodes)
    ]
    finished = [job.finish() for job in jobs]
    assert [(one.code, one.output) for one in finished] == [(0, "")] * len(nodes)


@pytest.mark.parametrize("nodes", [["", ""], ["a", "b"]])
def test_each_rank_counts_its_operations(nodes: list[str], tmp_path: Path) -> None:
    run_program(tmp_path, nodes)
    path = "shm" if nodes[0] == nodes[1] else "MPI"
    small = labelled(kind="all_reduce", size="to 4 KiB", path=path, data="staged")
    large = {"kind": "broadcast", "size": "to 1 MiB", "path": path}
    assert sorted(file.name for file in tmp_path.glob("*.prom*")) == [
        "hbmcomm-rank-0.prom",
        "hbmcomm-rank-1.prom",
    ]
    for rank in range(2):
        found = counters(tmp_path, rank)
        staged = labelled(**large, data="staged")
        if path == "shm":
            shared = labelled(**large, data="zero-copy")
            assert found["calls"] == {small: 1, staged: 1, shared: 1}
            assert found["bytes"] == {small: 40, staged: 400_000, shared: 400_000}
        else:
            assert found["calls"] == {small: 1, staged: 2}
            assert found["bytes"] == {small: 40, staged: 800_000}
        assert set(found["transit_seconds"]) == set(found["hidden_seconds"]) == set(found["calls"])
        for labels, seconds in found["transit_seconds"].items():
            assert seconds > 0
            assert 0 <= found["hidden_seconds"][labels] <= seconds
        assert found["uncounted"] == {labelled(): 0}
        waited = {
            dict(labels)["last_rank"]: seconds
            for labels, seconds in found["waiting_seconds"].items()
            if dict(labels)["kind"] == "all_reduce"
        }
        if rank == 0 and path == "shm":
            assert 0 < waited["1"] <= found["transit_seconds"][small]
        else:
            assert waited == {}  # ranks of different nodes share no clock


def test_a_profile_of_a_part_has_that_part(tmp_path: Path) -> None:
    run_program(tmp_path, ["", ""])
    profiles, _ = ranks.load(tmp_path / "part")
    assert [[one.kind for one in each.operations] for each in profiles] == [["broadcast"]] * 2
    assert [each.lost for each in profiles] == [0, 0]
