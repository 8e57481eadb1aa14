"""Plots of what `--json` wrote: python -m benchmarks.plot RESULT.json PLOT.png

The files in this folder are read, too: they are of earlier versions, without minimum, mean or what
a contender takes alone.

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
from benchmarks.layer_drop.plot import panels as of_layer_drop
from benchmarks.panels import Panel, save
from torch_hbmcomm.bench.report import machine_line
from torch_hbmcomm.bench.result import Measurement, Result

_PANELS: dict[str, Callable[[Result], tuple[list[Panel], int]]] = {
    "collectives": of_collectives,
    "box": of_box,
    "async_sgd": of_async_sgd,
    "layer_drop": of_layer_drop,
}


def read(text: str) -> Result:
    """Return the result that a JSON document has, also one of an earlier version.

    There the plan's fields lie at the top, contenders may be a list or have other names, and layer
    dropping's measurements are "rows" whose "samples" are several lists.
    """
    found = json.loads(text)
    contenders = found.get("contenders", {})
    if isinstance(contenders, list):
        contenders = dict.fromkeys(contenders, "")
    contenders = {_RENAMED.get(name, name): about for name, about in contenders.items()}
    plan = {name: found[name] for name in ("ranks", "rounds") if name in found}
    entries = [
        entry for name in ("measurements", "trainings", "rows") for entry in found.get(name, ())
    ]
    return Result(
        benchmark=found.get("benchmark") or _benchmark(entries[0] if entries else {}),
        machine=found["machine"],
        plan=found.get("plan", plan),
        sections=found.get("sections", found.get("models", {})),
        contenders=contenders,
        references=found.get("references", ()),
        unavailable=found.get("unavailable", {}),
        notes=found.get("notes", ()),
        measurements=[_measurement(entry) for entry in entries],
    )


def _benchmark(entry: Mapping[str, Any]) -> str:
    """Name the benchmark by a field that only its measurements have."""
    names = {
        "collective": "collectives",
        "phase": "ddp",
        "scenario": "async_sgd",
        "case": "layer_drop",
    }
    return next((found for name, found in names.items() if name in entry), "box")


_RENAMED = {"hbm shm in place": "hbm shm zero-copy"}  # contenders of earlier versions
_STATISTICS = re.compile(
    r"contender|calls_per_sample|values|curves|samples|p99_us|smallest_share|"
    r"(alone_)?(samples|median|minimum|mean)_\w+"
)


def _measurement(entry: Mapping[str, Any]) -> Measurement:
    unit = next((name[8:] for name in entry if name.startswith("samples_")), "")
    lists = entry.get("samples", {})  # of an earlier version: of a training, or by name
    samples = entry.get(f"samples_{unit}", lists if isinstance(lists, list) else ())
    values = dict(entry.get("values", {}))
    if entry.get("smallest_share") is not None:
        values["smallest_share"] = entry["smallest_share"]
    return Measurement(
        of={name: value for name, value in entry.items() if not _STATISTICS.fullmatch(name)},
        contender=_RENAMED.get(entry["contender"], entry["contender"]),
        samples=samples,
        unit=unit or "us",
        alone=entry.get(f"alone_samples_{unit}", ()),
        calls_per_sample=entry.get("calls_per_sample", 1),
        values=values,
        curves=entry.get("curves", lists if isinstance(lists, dict) else {}),
    )


def plot(result: Result, path: Path) -> None:
    """Write the figure of a result. Raises ValueError where there is nothing to show."""
    if result.benchmark not in _PANELS:
        raise ValueError(f"there is no plot of {result.benchmark}")
    panels, columns = _PANELS[result.benchmark](result)
    if not panels:
        raise ValueError("there is nothing to plot: nothing of what is shown was measured")
    save(panels, columns, machine_line(result), path)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.plot RESULT.json PLOT.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit("plots need matplotlib; install it with: pip install 'torch_hbmcomm[bench]'")
    try:
        plot(read(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    except (OSError, ValueError) as error:
        sys.exit(f"benchmarks.plot: {error}")


if __name__ == "__main__":
    main()
