"""Plots the results that `--json` writes: python -m benchmarks.plot RESULT.json PLOT.png

`python -m papers.plot` draws the records of the papers' benchmarks.

REQUIRES: matplotlib, which the extra "bench" installs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.box.plot import panels as of_box
from benchmarks.collectives.plot import panels as of_collectives
from benchmarks.panels import Panel, save
from benchmarks.scaling.plot import panels as of_scaling
from torch_hbmcomm.bench.report import machine_line
from torch_hbmcomm.bench.result import Result

Panels = Callable[[Result], tuple[list[Panel], int]]
"""Returns a result's panels and the number of columns."""

PANELS: Mapping[str, Panels] = {
    "collectives": of_collectives,
    "box": of_box,
    "scaling": of_scaling,
}


def plot(result: Result, path: Path, panels_of: Mapping[str, Panels] = PANELS) -> None:
    """Write the figure of a result. Raises ValueError if there is nothing to show."""
    if result.benchmark not in panels_of:
        raise ValueError(f"no plot is defined for results of the benchmark {result.benchmark}")
    panels, columns = panels_of[result.benchmark](result)
    if not panels:
        raise ValueError("nothing to plot: the result lacks all measurements that the plot shows")
    save(panels, columns, machine_line(result), path)


def command(usage: str, draw: Callable[[Path, Path], None]) -> None:
    """Run a command with two arguments: the file of a record, and the file of its plot."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m {usage}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit("plots need matplotlib; install it with: pip install 'torch_hbmcomm[bench]'")
    try:
        draw(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError) as error:
        sys.exit(f"{usage.partition(' ')[0]}: {error}")


def _draw(source: Path, path: Path) -> None:
    plot(Result.from_json(source.read_text()), path)


if __name__ == "__main__":
    command("benchmarks.plot RESULT.json PLOT.png", _draw)
