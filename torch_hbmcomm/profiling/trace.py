"""Writes a profile as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_hbmcomm.profiling.clocks import Clock
from torch_hbmcomm.profiling.costs import Costs
from torch_hbmcomm.profiling.ranks import RankProfile


def write(
    file: Path, profiles: Sequence[RankProfile], clocks: dict[int, Clock], found: Costs
) -> None:
    """Write one process for each rank, and in it one track for each group.

    Operations overlap, so they are asynchronous events. Their time is in µs from the start of the
    profile of the first rank that begins.
    """
    zero = min(clocks[one.rank].shared(one.begin) for one in profiles)
    events: list[dict[str, Any]] = []
    for profile in profiles:
        clock = clocks[profile.rank]
        error = "unknown" if clock.error is None else f"{clock.error / 1e3:.0f} us"
        title = f"rank {profile.rank} on {profile.host} (clock +- {error})"
        events.append(_named("process_name", profile.rank, title))
        events.append({**_named("process_sort_index", profile.rank, ""),
                       "args": {"sort_index": profile.rank}})  # fmt: skip
        for number, one in enumerate(profile.operations):
            event = {
                "name": one.kind,
                "cat": one.group.name,
                "id": f"{profile.rank}.{number}",
                "pid": profile.rank,
                "tid": one.group.name,
            }
            last, waited = found.waited.get((profile.rank, id(one)), (-1, 0))
            arguments = {
                "bytes": one.size,
                "sequence": one.sequence,
                "peer": one.peer,
                "path": one.path,
                "place": one.place,
                "data": one.data,
                "hidden_us": one.hidden / 1e3,
                "waiting_us": waited / 1e3,
                "last_rank": last,  # -1: waited for no rank
            }
            begin = (clock.shared(one.begin) - zero) / 1e3
            end = (clock.shared(one.end) - zero) / 1e3
            events.append({**event, "ph": "b", "ts": begin, "args": arguments})
            events.append({**event, "ph": "e", "ts": end})
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _named(what: str, rank: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "args": {"name": name}}
