"""The plot on the front page: python -m benchmarks.front_page RESULT.json PLOT.png

Draws all_reduce over message sizes, hbm next to Gloo, from a record of `benchmarks.collectives`:
the fastest calls on the left, the medians on the right.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.panels import Panel, save
from benchmarks.plot import command
from torch_hbmcomm.bench.report import machine_line
from torch_hbmcomm.bench.result import Measurement, Result

LINES = {
    "gloo": "Gloo",
    "hbm-staged": "hbm, ordinary tensors",
    "hbm-zero-copy": "hbm, tensors in shared memory",
}


def panels(result: Result) -> list[Panel]:
    """Return a panel of minima and one of medians. Raises ValueError if a line lacks points."""
    fastest = Panel("all_reduce, fastest call", "bytes", "µs", logarithmic=True)
    typical = Panel("all_reduce, median call", "bytes", "µs", logarithmic=True)
    for contender, label in LINES.items():
        points = sorted(
            (one for one in result.measurements if _is_all_reduce(one, contender)),
            key=lambda one: int(one.of["bytes"]),
        )
        if not points:
            raise ValueError(f"the record has no all_reduce of float32 by {contender}")
        sizes = [one.of["bytes"] for one in points]
        fastest.lines[label] = (sizes, [one.minimum for one in points], "-")
        typical.lines[label] = (sizes, [one.median for one in points], "-")
    return [fastest, typical]


def _is_all_reduce(one: Measurement, contender: str) -> bool:
    return one.contender == contender and (one.of["collective"], one.of["dtype"]) == (
        "allreduce",
        "float32",
    )


def _draw(source: Path, path: Path) -> None:
    result = Result.from_json(source.read_text())
    save(panels(result), 2, machine_line(result), path)


if __name__ == "__main__":
    command("benchmarks.front_page RESULT.json PLOT.png", _draw)
