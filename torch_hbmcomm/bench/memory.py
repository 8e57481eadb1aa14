"""Measures the memory of each NUMA node from the processors of one node: bandwidth and latency.

To find the bandwidth, it times the triad a = b + 3 c over float32, with a thread on each core, and
with one thread. The bandwidth counts the bytes that the triad reads and writes, as STREAM does. To
find the latency, it times loads that depend on one another. The nodes take turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from torch_hbmcomm.sizes import MIB, format_bytes, parse_bytes

NODES = "nodes"
TRIAD, TRIAD_ALONE, LOAD = "triad", "triad of one thread", "dependent loads"
_ARRAYS = 3
_CPU = Path("/sys/devices/system/cpu")
# The ratio of HBM's bandwidth to DDR's from which HBM pays.
_FASTER = 1.2
# With fewer than this share of the ideal speed-up, more threads gain little: memory is the limit.
_LINEAR = 0.8
_CACHES = 8  # the size of an array, in L3 caches


def default_size() -> int:
    """Return the bytes of an array: 256 MiB, or more if the processor's L3 cache is large."""
    cache = _CPU / "cpu0" / "cache" / "index3" / "size"
    size = parse_bytes(f"{cache.read_text().strip()}iB") if cache.exists() else 0
    return max(256 * MIB, _CACHES * size)


@dataclass(frozen=True)
class MemoryPlan:
    """size: bytes of each of three arrays of a triad, and of the memory of the loads."""

    size: int
    rounds: int = 7
    sections: Sequence[str] = (NODES,)

    def __post_init__(self) -> None:
        check_counts(self, {"rounds": 1})
        if self.size < MIB or self.size % 64:
            raise ValueError(f"the size is {self.size} bytes; at least {MIB}, a multiple of 64")


def _measure(plan: MemoryPlan, findings: Findings) -> None:
    """Measure all nodes. Binds this process to the CPUs of one NUMA node."""
    memory.bind("numa", 0, 1)
    threads = min(_cores(), load().core_quota())
    found: dict[tuple[int, str], list[float]] = {}
    nodes = [node for node in memory.info().nodes if node.total_bytes > 0]
    for turn in range(plan.rounds):
        findings.progress(f"round {turn + 1} of {plan.rounds}")
        for node in nodes:
            name = f"node {node.id}"
            if name in findings.unavailable:
                continue
            try:
                samples = _samples(node.id, plan.size, threads)
            except (MemoryError, RuntimeError) as error:
                findings.unavailable[name] = str(error)
                continue
            for what, value in samples.items():
                found.setdefault((node.id, what), []).append(value)
    for (node_id, what), samples_of in found.items():
        if f"node {node_id}" in findings.unavailable:
            continue
        of = {"section": NODES, "node": node_id, "what": what}
        of["bytes"] = 0 if what == LOAD else _ARRAYS * plan.size
        of["threads"] = threads if what == TRIAD else 1
        findings.add([sampled(of, "memory", samples_of)])


def _cores() -> int:
    """Return the number of cores that this process may use, without their hardware threads."""
    cpus = os.sched_getaffinity(0)
    files = [_CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in cpus]
    return len({file.read_text() if file.exists() else str(file) for file in files})


def _samples(node: int, size: int, threads: int) -> dict[str, float]:
    """Return the microseconds of TRIAD, TRIAD_ALONE and LOAD. Raises MemoryError if the node has no
    room for three arrays."""
    native = load()
    room = next(one.room_bytes for one in memory.info().nodes if one.id == node)
    if room < _ARRAYS * size:
        raise MemoryError(
            f"it has room for {format_bytes(room)}, and three arrays need "
            f"{format_bytes(_ARRAYS * size)}: choose a smaller --size"
        )
    blocks = [native.memory_on_node(node, size) for _ in range(_ARRAYS)]
    a, b, c = (block.view(torch.float32) for block in blocks)
    found = {
        TRIAD: _triad_us(a, b, c, threads),
        TRIAD_ALONE: _triad_us(a, b, c, 1),
        LOAD: native.memory_load_seconds(a) * 1e6,
    }
    torch.set_num_threads(threads)
    return found


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

    nodes: the TRIAD, TRIAD_ALONE and LOAD of each node, from the CPUs of info.cpu_node
    """
    if info.mode == "hbm-only":
        return "All memory is HBM: there is nothing to choose."
    if info.mode == "cache":
        return "HBM is a cache of DDR here, and cannot be chosen."
    if info.mode == "hybrid":
        return "Cannot tell: a part of HBM is a cache of DDR here (hybrid mode)."
    fast = [node for node in info.closest_hbm_nodes if node in nodes]
    ddr = info.cpu_node
    if not fast or ddr is None or ddr not in nodes:
        return "No HBM and DDR of the same processors were measured: there is nothing to compare."
    speeds = {node: gigabytes_per_second(found[TRIAD]) for node, found in nodes.items()}
    node = max(fast, key=speeds.__getitem__)
    ratio = speeds[node] / speeds[ddr]
    compared = f"HBM node {node} has {ratio:.2f} times the bandwidth of DDR node {ddr}"
    if ratio >= _FASTER:
        return f"HBM pays: {compared}."
    with_one = gigabytes_per_second(nodes[node][TRIAD_ALONE])
    threads = nodes[node][TRIAD].of["threads"]
    if speeds[node] >= _LINEAR * threads * with_one:
        return (
            f"Cannot tell: {compared}, but {threads} threads are {speeds[node] / with_one:.1f} "
            "times as fast as one. So the processors are the limit, and not memory: allow this "
            "command all cores of a node."
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
    table = report.table_of(f"from the processors of node {info.cpu_node} (medians)", headings)
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
