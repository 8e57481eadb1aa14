"""`hbmcomm bench memory`: the speed of each node's memory, and whether HBM pays."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from harness.command_line import run

from torch_hbmcomm import memory
from torch_hbmcomm.bench.memory import LOAD, TRIAD, TRIAD_ALONE, verdict
from torch_hbmcomm.bench.result import Measurement, sampled
from torch_hbmcomm.native import load
from torch_hbmcomm.sizes import MIB

Mode = Literal["none", "flat", "cache", "hybrid", "hbm-only"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return run("bench", "memory", *options)


def test_each_node_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    done = bench("--size", "1MiB", "--rounds", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["measurements"]
    room = {node.id for node in memory.info().nodes if node.room_bytes > 100 * MIB}
    found = {(row["node"], row["what"]) for row in rows}
    assert found >= {(node, what) for node in room for what in (TRIAD, TRIAD_ALONE, LOAD)}
    assert all(row["n"] == 2 and row["minimum_us"] > 0 for row in rows)
    assert "to compare" in done.stdout or "HBM" in done.stdout


def test_a_node_without_room_is_named() -> None:
    node = memory.info().nodes[0]
    done = bench("--size", f"{node.total_bytes // 64 * 64}", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert f"not measured: node {node.id}: it has room for" in done.stdout
    assert "choose a smaller --size" in done.stdout


def test_a_wrong_size_is_refused() -> None:
    for size in ("1KiB", "much", str(MIB + 1)):
        done = bench("--size", size)
        assert done.returncode == 2
        assert "size" in done.stderr


def test_memory_is_on_the_node_that_was_asked_for() -> None:
    for node in memory.info().nodes:
        if node.room_bytes < MIB:
            continue
        block = load().memory_on_node(node.id, MIB)
        assert memory.where(block) == {node.id: MIB}
        assert load().memory_load_seconds(block) > 0
        assert torch.count_nonzero(block) > 0


def test_more_than_a_node_has_is_an_error() -> None:
    node = memory.info().nodes[0]
    with pytest.raises(MemoryError, match=f"on NUMA node {node.id}: [0-9]+ bytes fit"):
        load().memory_on_node(node.id, node.total_bytes + MIB)


def info(mode: Mode, hbm: set[int]) -> memory.Info:
    nodes = tuple(memory.Node(i, 1 << 30, 1 << 30, 1 << 29, i in hbm, i == 0, "") for i in (0, 1))
    known: dict[str, Any] = dict.fromkeys(("hbm_source", "mode_source", "cluster"), "")
    known |= {"memkind_version": "", "segments": (), "settings": {}, "cpu_node": 0}
    known |= {"cpu_nodes": 1, "room_bytes": 1 << 30}
    return memory.Info(bool(hbm), mode=mode, closest_hbm_nodes=tuple(hbm), nodes=nodes, **known)


def node_of(speed: float, one: float) -> dict[str, Measurement]:
    """speed, one: GB/s of 4 threads, and of one thread."""
    of = {"section": "nodes", "bytes": 10**9}
    return {
        TRIAD: sampled(of | {"threads": 4}, "memory", [1e6 / speed]),
        TRIAD_ALONE: sampled(of | {"threads": 1}, "memory", [1e6 / one]),
    }


@pytest.mark.parametrize(
    ("fast", "words"),
    [
        ((300.0, 80.0), "HBM pays: HBM node 1 has 3.00 times the bandwidth of DDR node 0."),
        (
            (102.0, 26.0),
            "Cannot tell: HBM node 1 has 1.02 times the bandwidth of DDR node 0, but 4",
        ),
        ((102.0, 60.0), "HBM does not pay: HBM node 1 has 1.02 times"),
    ],
)
def test_the_verdict_says_whether_hbm_pays(fast: tuple[float, float], words: str) -> None:
    nodes = {0: node_of(100, 30), 1: node_of(*fast)}
    assert verdict(nodes, info("flat", {1})).startswith(words)


def test_the_verdict_without_a_choice() -> None:
    nodes = {0: node_of(100, 30), 1: node_of(100, 30)}
    assert verdict(nodes, info("hbm-only", {0, 1})).startswith("All memory is HBM")
    assert verdict(nodes, info("cache", set())).startswith("HBM is a cache")
    assert verdict(nodes, info("hybrid", {1})).startswith("Cannot tell")
    assert "nothing to compare" in verdict(nodes, info("none", set()))
    assert "nothing to compare" in verdict({1: node_of(100, 30)}, info("flat", {1}))
