"""Measures the memory of each NUMA node from this process' processors: bandwidth and latency.

The bandwidth is that of the triad a = b + 3 c over float32, with PyTorch's threads, and of one
thread. It counts the bytes that the triad reads and writes, as STREAM does. The latency is that of
loads which depend on one another. The nodes take turns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from torch_hbmcomm import memory
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import (
    Findings,
    Measurement,
    Result,
    Section,
    check_counts,
    sampled,
)
from torch_hbmcomm.native import load
from torch_hbmcomm.sizes import MIB, format_bytes

NODES = "nodes"
TRIAD, TRIAD_ALONE, LOAD = "triad", "triad of one thread", "dependent loads"
_ARRAYS = 3
# HBM pays if its bandwidth is so many times that of DDR.
_FASTER = 1.2
# With fewer than this share of the ideal speed-up, more threads gain little: memory is the limit.
_LINEAR = 0.8


@dataclass(frozen=True)
class MemoryPlan:
    """size: bytes of each of three arrays of a triad, and of the memory of the loads."""

    sections: Sequence[str] = (NODES,)
    size: int = 256 * MIB
    rounds: int = 7

    def __post_init__(self) -> None:
        check_counts(self, {"rounds": 1})
        if self.size < MIB:
            raise ValueError(f"the size is {self.size} bytes; at least {MIB}")


def _measure(plan: MemoryPlan, findings: Findings) -> None:
    native = load()
    arrays: dict[int, list[torch.Tensor]] = {}
    for node in memory.info().nodes:
        needed = _ARRAYS * plan.size
        if node.room_bytes < needed:
            findings.unavailable[f"node {node.id}"] = (
                f"it has room for {format_bytes(node.room_bytes)}, and three arrays need "
                f"{format_bytes(needed)}: choose a smaller --size"
            )
            continue
        blocks = [native.memory_on_node(node.id, plan.size) for _ in range(_ARRAYS)]
        arrays[node.id] = [block.view(torch.float32) for block in blocks]
    threads = torch.get_num_threads()
    found: dict[tuple[int, str], list[float]] = {}
    for turn in range(plan.rounds):
        findings.progress(f"round {turn + 1} of {plan.rounds}")
        for node_id, (a, b, c) in arrays.items():
            for what, count in ((TRIAD, threads), (TRIAD_ALONE, 1)):
                found.setdefault((node_id, what), []).append(_triad_us(a, b, c, count))
            loads = native.memory_load_seconds(a) * 1e6
            found.setdefault((node_id, LOAD), []).append(loads)
    torch.set_num_threads(threads)
    for (node_id, what), samples in found.items():
        of = {"section": NODES, "node": node_id, "what": what}
        of["bytes"] = 0 if what == LOAD else _ARRAYS * plan.size
        of["threads"] = threads if what == TRIAD else 1
        findings.add([sampled(of, "memory", samples)])


def _triad_us(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, threads: int) -> float:
    torch.set_num_threads(threads)
    torch.add(b, c, alpha=3, out=a)
    begin = time.perf_counter()
    torch.add(b, c, alpha=3, out=a)
    return (time.perf_counter() - begin) * 1e6


SECTIONS = {NODES: Section(NODES, "bandwidth and latency of each NUMA node", _measure)}


def gigabytes_per_second(found: Measurement) -> float:
    return float(found.of["bytes"]) / found.median / 1e3


def verdict(nodes: Mapping[int, Mapping[str, Measurement]], info: memory.Info) -> str:
    """Return a sentence that says whether HBM pays on this machine.

    nodes: the measurements of each node, by what they measure
    """
    speeds = {node: gigabytes_per_second(found[TRIAD]) for node, found in nodes.items()}
    fast = {node.id: speeds[node.id] for node in info.nodes if node.is_hbm and node.id in speeds}
    if info.mode == "hbm-only":
        return "All memory is HBM: there is nothing to choose."
    if info.mode == "cache":
        return "HBM is a cache of DDR here, and cannot be chosen."
    slow = [speed for node, speed in speeds.items() if node not in fast]
    if not fast or not slow:
        return "No HBM and DDR were measured, so there is nothing to compare."
    node = max(fast, key=fast.__getitem__)
    ratio = fast[node] / max(slow)
    compared = f"HBM node {node} has {ratio:.2f} times the bandwidth of DDR"
    if ratio >= _FASTER:
        return f"HBM pays: {compared}."
    with_one = gigabytes_per_second(nodes[node][TRIAD_ALONE])
    threads = nodes[node][TRIAD].of["threads"]
    if fast[node] >= _LINEAR * threads * with_one:
        return (
            f"Cannot tell: {compared}, but {threads} threads are {fast[node] / with_one:.1f} times "
            "as fast as one, so the processors are the limit and not memory. Measure with all "
            "processors of the machine (OMP_NUM_THREADS)."
        )
    return f"HBM does not pay: {compared}."


def render(result: Result) -> RenderableType:
    nodes: dict[int, dict[str, Measurement]] = {}
    for one in result.measurements:
        nodes.setdefault(one.of["node"], {})[one.of["what"]] = one
    info = memory.info()
    kinds = {node.id: "HBM" if node.is_hbm else "DDR" for node in info.nodes}
    threads = next(iter(nodes.values()))[TRIAD].of["threads"] if nodes else 1
    headings = ["node", "memory", f"{threads} threads, GB/s", "one thread, GB/s", "a load, ns"]
    table = report.table_of("memory from this process' processors (medians)", headings)
    for node, found in nodes.items():
        table.add_row(
            str(node),
            kinds.get(node, ""),
            f"{gigabytes_per_second(found[TRIAD]):.1f}",
            f"{gigabytes_per_second(found[TRIAD_ALONE]):.1f}",
            f"{found[LOAD].median * 1e3:.0f}",
        )
    missing = [Text(f"not measured: {name}: {why}") for name, why in result.unavailable.items()]
    return Group(table, *missing, Text(verdict(nodes, info)))
