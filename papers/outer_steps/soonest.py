"""Seconds until each way reaches a quality. Every way has its best number of steps:

    python -m papers.outer_steps.soonest outer-steps-link.jsonl --reach 97 97.5

reads records that `python -m papers.outer_steps --json` wrote with several `--steps`. Without
`--reach` it takes the final quality of each row. The quality is an accuracy, or a loss times -1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from torch_hbmcomm.bench import report

Row = Mapping[str, Any]

_OF_A_RUN = ("task", "optimizer", "rate", "workers", "megabits", "slow", "kill_at")


def soonest(rows: Iterable[Row], aim: float) -> dict[str, float | None]:
    """Return the least seconds until each contender reaches the aim. None: it never does.

    rows: one task and one link, with any numbers of steps
    """
    least: dict[str, float | None] = {}
    for row in rows:
        name = row["contender"]
        reached = [
            seconds
            for seconds, quality in zip(row["seconds_at"], row["quality_at"], strict=True)
            if quality >= aim
        ]
        before = least.get(name)
        least[name] = min((*reached, *([] if before is None else [before])), default=None)
    return least


def table(rows: Sequence[Row], aims: Sequence[float] | None = None) -> Table:
    """Return a table of soonest(). aims: None takes the final qualities of all rows."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lengths = sorted({row["steps"] for row in rows})
    link = rows[0]["megabits"]
    title = f"{rows[0]['task']}, seconds, best of {', '.join(map(str, lengths))} steps"
    found = Table("quality", *names, title=title + (f", {link} Mbit/s" if link else ""))
    for aim in sorted(aims or {row["quality_at"][-1] for row in rows}):
        seconds = soonest(rows, aim)
        found.add_row(f"{aim:.3f}", *(_shown(seconds[name]) for name in names))
    return found


def _shown(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds until each way reaches a quality.")
    parser.add_argument("record", type=Path)
    parser.add_argument("--reach", type=float, nargs="+", help="qualities")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.record.read_text().splitlines()]
    # One run of the program has one value of each of these.
    for _, some in groupby(rows, key=lambda row: [row[name] for name in _OF_A_RUN]):
        report.show(table(list(some), args.reach))


if __name__ == "__main__":
    main()
