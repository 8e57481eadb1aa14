"""Plots of what `--json` wrote: python -m benchmarks.plot RESULT.json PLOT.png

The files in this folder are read, too: they are of earlier versions, without minimum, mean or what
a contender takes alone.

REQUIRES: matplotlib, which the extra "bench" installs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_hbmcomm.bench.report import machine_line
from torch_hbmcomm.bench.result import Measurement, Result


@dataclass
class Panel:
    """One pair of axes.

    lines: by name, the points x and y, and how it is drawn ("-", "--"). An x that is text is a
    category.
    bars: by name, the lengths; labels: the categories of the bars. Stacked bars lie across.
    shaded: the height up to which the background is grey.
    """

    title: str
    x: str = ""
    y: str = ""
    lines: dict[str, tuple[list[Any], list[float], str]] = field(default_factory=dict)
    bars: dict[str, list[float]] = field(default_factory=dict)
    labels: Sequence[str] = ()
    stacked: bool = False
    logarithmic: bool = False
    shaded: float = 0.0


def save(panels: Sequence[Panel], columns: int, title: str, path: Path) -> None:
    """Write a figure with the panels, row by row."""
    from matplotlib.figure import Figure

    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, place in zip(panels, axes, strict=False):
        _draw(place, panel)
    for empty in axes[len(panels) :]:
        empty.remove()
    figure.suptitle(title, fontsize="medium", wrap=True)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, panel: Panel) -> None:
    for name, (xs, ys, style) in panel.lines.items():
        axes.plot(xs, ys, style, marker=".", label=name)
    width = 0.8 / max(1, len(panel.bars))
    left = [0.0] * len(panel.labels)
    for index, (name, lengths) in enumerate(panel.bars.items()):
        if panel.stacked:
            axes.barh(panel.labels, lengths, left=left, label=name)
            left = [at + length for at, length in zip(left, lengths, strict=True)]
        else:
            shift = (index - (len(panel.bars) - 1) / 2) * width
            places = [place + shift for place in range(len(panel.labels))]
            axes.bar(places, lengths, width, label=name)
    if panel.stacked:
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize="x-small")
    elif panel.bars:
        axes.set_xticks(range(len(panel.labels)), panel.labels)
    if panel.shaded:
        axes.axhspan(0, panel.shaded, color="lightgrey", alpha=0.8, zorder=3, label="computation")
    if panel.logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    elif panel.lines:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.tick_params(axis="x", labelsize="x-small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


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
    from benchmarks.async_sgd.plot import panels as of_async_sgd
    from benchmarks.box.plot import panels as of_box
    from benchmarks.collectives.plot import panels as of_collectives
    from benchmarks.layer_drop.plot import panels as of_layer_drop

    shown = {
        "collectives": of_collectives,
        "box": of_box,
        "async_sgd": of_async_sgd,
        "layer_drop": of_layer_drop,
    }
    if result.benchmark not in shown:
        raise ValueError(f"there is no plot of {result.benchmark}")
    panels, columns = shown[result.benchmark](result)
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
