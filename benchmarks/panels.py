"""Panels of plots, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Panel:
    """One pair of axes.

    lines: for each name, the x and y of its points, and the line style ("-", "--"). An x may be
    text, which names a category.
    bars: for each name, the lengths of its bars, one for each label.
    labels: the categories of the bars.
    stacked: True: the bars are stacked and horizontal.
    logarithmic: True: both axes are logarithmic.
    logarithmic_y: True: the y axis alone is logarithmic.
    shaded: the value on the y axis up to which the background is grey.
    lowest: lower end of the y axis, if the panel has lines and no logarithmic axis.
    """

    title: str
    x: str = ""
    y: str = ""
    lines: dict[str, tuple[list[Any], list[float], str]] = field(default_factory=dict)
    bars: dict[str, list[float]] = field(default_factory=dict)
    labels: Sequence[str] = ()
    stacked: bool = False
    logarithmic: bool = False
    logarithmic_y: bool = False
    shaded: float = 0.0
    lowest: float = 0.0


def save(panels: Sequence[Panel], columns: int, title: str, path: Path) -> None:
    """Write a figure with the panels, row by row."""
    from matplotlib.figure import Figure

    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, own in zip(panels, axes, strict=False):
        _draw(own, panel)
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
            positions = [number + shift for number in range(len(panel.labels))]
            axes.bar(positions, lengths, width, label=name)
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
    elif panel.logarithmic_y:
        axes.set_yscale("log")
    elif panel.lines:
        axes.set_ylim(bottom=panel.lowest)
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.tick_params(axis="x", labelsize="x-small")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")
