"""Plots the papers' records: python -m papers.plot RESULT.json|RECORDS.jsonl PLOT.png

papers.layer_drop.accuracy writes RECORDS.jsonl, with a line for each contender.

REQUIRES: matplotlib, which the extra "bench" installs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.panels import save
from benchmarks.plot import Panels, command, plot
from papers.async_sgd.plot import panels as of_async_sgd
from papers.layer_drop.curves import panels as of_accuracy
from papers.layer_drop.plot import panels as of_layer_drop
from torch_hbmcomm.bench.result import Result

PANELS: Mapping[str, Panels] = {"async_sgd": of_async_sgd, "layer_drop": of_layer_drop}


def plot_records(text: str, path: Path) -> None:
    """Draw records, one JSON object a line. Raises ValueError if there is nothing to show."""
    panels, columns = of_accuracy([json.loads(line) for line in text.splitlines()])
    if not panels:
        raise ValueError("nothing to plot: the records have no curves")
    save(panels, columns, "loss of quality with a part of the bytes", path)


def _draw(source: Path, path: Path) -> None:
    if source.suffix == ".jsonl":
        plot_records(source.read_text(), path)
    else:
        plot(Result.from_json(source.read_text()), path, PANELS)


if __name__ == "__main__":
    command("papers.plot RESULT.json|RECORDS.jsonl PLOT.png", _draw)
