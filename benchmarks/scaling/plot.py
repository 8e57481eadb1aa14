"""Plots the measured times over the ranks, and the model's predictions."""

from __future__ import annotations

from benchmarks.panels import Panel
from benchmarks.scaling.growths import growths
from torch_hbmcomm.bench.result import Result


def panels(result: Result) -> tuple[list[Panel], int]:
    """Return a panel for each quantity, and the number of columns."""
    found: dict[str, Panel] = {}
    for quantity, contender, row, growth, _ in growths(result.measurements):
        panel = found.setdefault(quantity, Panel(quantity, "ranks", "ms", logarithmic=True))
        ranks = sorted(row)
        panel.lines[contender] = (ranks, [row[count] * 1e3 for count in ranks], "-")
        panel.lines[f"{contender}, model"] = (
            ranks,
            [growth.here(count) * 1e3 for count in ranks],
            "--",
        )
    return list(found.values()), len(found)
