"""Reads the files of a profile: one for each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_hbmcomm.version import __version__

VERSION = 3
"""Of the files' format. Change it with every change of a field or of its meaning."""


@dataclass(frozen=True)
class Group:
    key: str  # equal on all ranks; no other group has it
    name: str
    ranks: tuple[int, ...]  # each rank's number in the job
    nodes: tuple[int, ...]  # of each rank, numbered within the group: ranks of a node share memory
    rank: int  # of the process that wrote the file


@dataclass(frozen=True)
class Operation:
    """One operation of one rank. Times: ns of the rank's clock."""

    group: Group
    kind: str
    sequence: int  # of a collective; 0: a message
    peer: int  # of a message; -1: none, or any
    size: int  # bytes
    path: str  # "shm", "MPI" or "shm, MPI"
    place: str  # of the tensors: "segment" (all of them), "ordinary" or "device"
    data: str  # "zero-copy", "staged", "staged, zero-copy" or "none"
    begin: int
    end: int  # 0: not ended
    waited: int  # ns that threads of the program have waited for it
    busy: int  # ns that the issuing thread computed while it was in transit

    @property
    def transit(self) -> int:
        return self.end - self.begin

    @property
    def hidden(self) -> int:
        """The time in transit in which the issuing thread computed."""
        return max(0, min(self.busy, self.transit - self.waited))


@dataclass(frozen=True)
class RankProfile:
    rank: int  # in the job
    host: str
    clock: str  # ranks with one name have one clock
    begin: int  # of the oldest recorded operation, if earlier ones are lost
    end: int
    written: float  # s since the epoch
    groups: frozenset[str]  # keys of the first group of the process, and of those in `operations`
    lost: int  # operations before the oldest one
    operations: tuple[Operation, ...]  # in the order of issue; each has ended
    unfinished: int  # the number of the other operations

    def is_of_a_run_with(self, other: RankProfile) -> bool:
        """Return True if both ranks have surely written their files in one run."""
        one_time = self.begin < other.end and other.begin < self.end
        return bool(self.groups & other.groups) or (self.clock == other.clock and one_time)


def load(folder: Path) -> tuple[list[RankProfile], list[str]]:
    """Return the ranks of a profile, in order, and the names of files of other runs.

    The first of these ranks is the one that wrote last. A further one has formed a group with
    another rank of the profile, or recorded at the same time by the same clock. The times of
    writing do not tell two runs apart, because the machines' clocks differ.

    Raises ValueError for a wrong or missing file.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name the folder of the files rank-N.json")
    files = sorted(folder.glob("rank-*.json"))
    if not files:
        raise ValueError(
            f"{folder} has no files rank-N.json: run the program with HBMCOMM_PROFILE={folder}, or "
            "in hbmcomm.profile()"
        )
    profiles = sorted((_rank(file) for file in files), key=lambda one: one.rank)
    ranks = {max(profiles, key=lambda one: one.written).rank}
    found = 0
    while found < len(ranks):
        found = len(ranks)
        together = [one for one in profiles if one.rank in ranks]
        ranks |= {one.rank for one in profiles if any(map(one.is_of_a_run_with, together))}
    return together, [f"rank-{one.rank}.json" for one in profiles if one.rank not in ranks]


def nodes(profiles: Sequence[RankProfile]) -> int:
    """Return the number of nodes. Ranks that share memory in some group are on one node."""
    node_of = {one.rank: {one.rank} for one in profiles}
    for group in {
        id(one.group): one.group for each in profiles for one in each.operations
    }.values():
        first: dict[int, int] = {}  # the first rank of each node that has a file
        for rank, node in zip(group.ranks, group.nodes, strict=True):
            if rank in node_of:
                joined = node_of[first.setdefault(node, rank)] | node_of[rank]
                node_of.update(dict.fromkeys(joined, joined))
    return len({id(one) for one in node_of.values()})


def _rank(file: Path) -> RankProfile:
    try:
        found = json.loads(file.read_text())
        version = found["version"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a file of a profile: {error!r}") from error
    if version != VERSION:
        raise ValueError(
            f"{file} has version {version} of the format of profiles, and torch_hbmcomm "
            f"{__version__} reads version {VERSION}: record the profile again, or show it with the "
            "release that has recorded it. If the file is of an earlier run, delete it"
        )
    try:
        groups = [_group(one) for one in found["groups"]]
        operations = [_operation(one, groups) for one in found["operations"]]
        ended = tuple(one for one in operations if one.end)
        begin = operations[0].begin if found["lost"] else found["begin"]
        return RankProfile(
            rank=found["rank"],
            host=found["host"],
            clock=found["clock"],
            begin=begin,
            end=found["end"],
            written=found["written"],
            groups=frozenset({found["first_group"], *(one.key for one in groups)} - {""}),
            lost=found["lost"],
            operations=ended,
            unfinished=len(operations) - len(ended),
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{file} is not a file of a profile: {error!r}") from error


def _group(found: Mapping[str, Any]) -> Group:
    return Group(
        key=found["key"],
        name=found["name"],
        ranks=tuple(found["ranks"]),
        nodes=tuple(found["nodes"]),
        rank=found["rank"],
    )


def _operation(found: Mapping[str, Any], groups: list[Group]) -> Operation:
    return Operation(
        group=groups[found["group"]],
        kind=found["kind"],
        sequence=found["sequence"],
        peer=found["peer"],
        size=found["bytes"],
        path=found["path"],
        place=found["place"],
        data=found["data"],
        begin=found["begin"],
        end=found["end"],
        waited=found["waited"],
        busy=found["busy"],
    )
