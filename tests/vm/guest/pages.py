"""Parses the output of pages.cpp: blocks, and the nodes that hbm and the kernel report for them."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

MAPPING = re.compile(r"[0-9a-f]{8,} ")
NODE_PAGES = re.compile(r" N(\d+)=(\d+)")
PAGE_SIZE = re.compile(r" kernelpagesize_kB=(\d+)")


@dataclass(frozen=True)
class Report:
    """The memory that one process allocated."""

    name: str
    bytes: int
    refusal: str  # why it got no more; empty if it got all
    ours: dict[int, int]  # NUMA node -> bytes of the blocks, by hbm::memory::where
    kernel: dict[int, int]  # NUMA node -> bytes of the mappings that hold blocks, by numa_maps

    def agrees(self) -> bool:
        """Return True if all bytes are on nodes, and the kernel reports as many or more on each."""
        everywhere = sum(self.ours.values()) == self.bytes
        same_nodes = self.ours.keys() == self.kernel.keys()
        return everywhere and same_nodes and all(self.kernel[n] >= b for n, b in self.ours.items())


def parse_reports(output: str) -> list[Report]:
    """Return the reports in `output`, in order; other lines are ignored."""
    starts = [match.start() for match in re.finditer(r"^\{", output, re.MULTILINE)]
    parts = [output[a:b] for a, b in zip(starts, [*starts[1:], len(output)], strict=True)]
    return [parse_report(part) for part in parts]


def parse_report(text: str) -> Report:
    first, *rest = text.splitlines()
    head = json.loads(first)
    maps = [line for line in rest if MAPPING.match(line)]
    starts = [int(line.split()[0], 16) for line in maps]
    used: set[int] = set()
    ours: Counter[int] = Counter()
    for block in head["blocks"]:
        begin, size = block["address"], block["bytes"]
        last = begin + size - 1
        used.update(range(bisect_right(starts, begin) - 1, bisect_right(starts, last)))
        ours.update({int(node): there for node, there in block["where"].items()})
    kernel: Counter[int] = Counter()
    for index in used:
        page = PAGE_SIZE.search(maps[index])
        if page is None:  # no page of the mapping is in memory
            continue
        for node, pages in NODE_PAGES.findall(maps[index]):
            kernel[int(node)] += int(pages) * int(page[1]) * 1024
    total = sum(block["bytes"] for block in head["blocks"])
    return Report(head["name"], total, head["refusal"], dict(ours), dict(kernel))
