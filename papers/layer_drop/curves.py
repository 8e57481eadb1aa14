"""Plots of the records of accuracy.py: a model's quality over steps, and over time.

There are plots over time if the ranks were on two hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.panels import Panel

_WORST = 15.0  # points of accuracy below the best at which the axis ends


def panels(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Panel], int]:
    """Return panels for each task, optimizer, link and first seed, and the number of columns."""
    groups: dict[tuple[str, str, int | None, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "quality_at" in row:
            key = row["task"], row["optimizer"], row["megabits"], row.get("first_seed", 0)
            groups.setdefault(key, []).append(row)
    shown = [_panel(*key, group, "steps") for key, group in groups.items()]
    shown += [_panel(*key, group, "seconds") for key, group in groups.items() if key[2] is not None]
    return shown, min(len(shown), 3)


def _panel(
    task: str,
    optimizer: str,
    megabits: int | None,
    first_seed: int,
    rows: Sequence[Mapping[str, Any]],
    over: str,
) -> Panel:
    losses = rows[0]["quality_at"][-1] < 0
    link = "" if megabits is None else f", {megabits} Mbit/s"
    seeds = rows[0]["qualities"]["n"]
    which = f"means of {seeds} seeds" if seeds > 1 else "one seed"
    which += f" from {first_seed}" if first_seed else ""
    panel = Panel(
        f"{task}, {optimizer}{link}\n{which}",
        over,
        "loss on test data" if losses else "accuracy on test images, %",
    )
    found = [value for row in rows for value in row["quality_at"]]
    panel.lowest = min(-value for value in found) * 0.97 if losses else max(found) - _WORST
    for row in rows:
        name = row["contender"] + (f", R = {row['ratio']:g}" if row["ratio"] else "")
        name += f", {row['steps']} steps" if row["steps"] != rows[0]["steps"] else ""
        ys = [abs(value) for value in row["quality_at"]]
        panel.lines[name] = row[f"{over}_at"], ys, "-" if row["contender"] != "PowerSGD" else "--"
    return panel
