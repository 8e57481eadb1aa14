"""Plots of what `--json` wrote: python -m benchmarks.plot RESULT.json PLOT.png

The records of benchmarks.layer_drop.accuracy have a line for each contender: RECORDS.jsonl.

REQUIRES: matplotlib, which the extra "bench" installs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.async_sgd.plot import panels as of_async_sgd
from benchmarks.box.plot import panels as of_box
from benchmarks.collectives.plot import panels as of_collectives
from benchmarks.layer_drop.curves import panels as of_accuracy
from benchmarks.layer_drop.plot import panels as of_layer_drop
from benchmarks.panels import Panel, save
from benchmarks.scaling.plot import panels as of_scaling
from torch_hbmcomm.bench.report import machine_line
from torch_hbmcomm.bench.result import Measurement, Result

_PANELS: dict[str, Callable[[Result], tuple[list[Panel], int]]] = {
    "collectives": of_collectives,
    "box": of_box,
    "async_sgd": of_async_sgd,
    "layer_drop": of_layer_drop,
    "scaling": of_scaling,
}


def read(text: str) -> Result:
    """Return the result that a JSON document of --json has."""
    found = json.loads(text)
    measurements = [_measurement(entry) for entry in found.pop("measurements")]
    return Result(**found, measurements=measurements)


_STATISTICS = re.compile(
    r"contender|calls_per_sample|values|curves|p99_us|"
    r"(alone_)?(samples|median|minimum|mean)_\w+"
)


def _measurement(entry: Mapping[str, Any]) -> Measurement:
    unit = next((name[8:] for name in entry if name.startswith("samples_")), "us")
    return Measurement(
        of={name: value for name, value in entry.items() if not _STATISTICS.fullmatch(name)},
        contender=entry["contender"],
        samples=entry.get(f"samples_{unit}", ()),
        unit=unit,
        alone=entry.get(f"alone_samples_{unit}", ()),
        calls_per_sample=entry.get("calls_per_sample", 1),
        values=entry.get("values", {}),
        curves=entry.get("curves", {}),
    )


def plot(result: Result, path: Path) -> None:
    """Write the figure of a result. Raises ValueError where there is nothing to show."""
    if result.benchmark not in _PANELS:
        raise ValueError(f"there is no plot of {result.benchmark}")
    panels, columns = _PANELS[result.benchmark](result)
    if not panels:
        raise ValueError("there is nothing to plot: nothing of what is shown was measured")
    save(panels, columns, machine_line(result), path)


def plot_records(text: str, path: Path) -> None:
    """Write the figure of lines of JSON. Raises ValueError where there is nothing to show."""
    panels, columns = of_accuracy([json.loads(line) for line in text.splitlines()])
    if not panels:
        raise ValueError("there is nothing to plot: the records have no curves")
    save(panels, columns, "what training loses with a part of the bytes", path)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.plot RESULT.json|RECORDS.jsonl PLOT.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit("plots need matplotlib; install it with: pip install 'torch_hbmcomm[bench]'")
    try:
        source, path = Path(sys.argv[1]), Path(sys.argv[2])
        if source.suffix == ".jsonl":
            plot_records(source.read_text(), path)
        else:
            plot(read(source.read_text()), path)
    except (OSError, ValueError) as error:
        sys.exit(f"benchmarks.plot: {error}")


if __name__ == "__main__":
    main()
