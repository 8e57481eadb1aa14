"""A result as a figure: where an iteration's time goes, as in the paper's Figs. 9 and 14, and what
was learned over steps and over time, as in its Figs. 5 to 8.

REQUIRES: matplotlib, which the extra "bench" installs, and something of these in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torch_hbmcomm.bench.layer_drop.result import Result, machine_line
from torch_hbmcomm.bench.layer_drop.section import Row

_PARTS = {
    "compute_ms": "compute",
    "worker_ms": "worker's compute",
    "server_ms": "server's compute",
    "communication_ms": "communication",
}
_CURVES = tuple((what, over) for over in ("steps", "seconds") for what in ("loss", "accuracy"))
_LINES = 2


def panels(result: Result) -> list[tuple[str, str]]:
    """Section and case of the bars."""
    found = [(row.section, row.case) for row in result.rows if "communication_ms" in row.values]
    return list(dict.fromkeys(found))


def curves(result: Result) -> list[Row]:
    return [row for row in result.rows if "accuracy" in row.samples]


def save(result: Result, path: Path) -> None:
    bars, learned = panels(result), curves(result)
    count = len(bars) + (len(_CURVES) if learned else 0)
    columns = -(-count // _LINES)
    figure = Figure(figsize=(4.4 * columns, 7.2), layout="constrained")
    axes = figure.subplots(_LINES, columns, squeeze=False).T.flatten()
    for (section, case), panel in zip(bars, axes, strict=False):
        rows = [row for row in result.rows if (row.section, row.case) == (section, case)]
        _draw_bars(panel, rows)
        panel.set_title(f"{section}\n{case}", fontsize="medium")
    if learned:
        for (what, over), panel in zip(_CURVES, axes[len(bars) :], strict=False):
            _draw_curves(panel, learned, what, over)
    for empty in axes[count:]:
        empty.remove()
    figure.suptitle(machine_line(result), fontsize="medium")
    figure.savefig(path, dpi=120)


def _draw_bars(panel: Axes, rows: Sequence[Row]) -> None:
    names = [row.contender for row in rows]
    left = [0.0] * len(rows)
    for index, (part, label) in enumerate(_PARTS.items()):
        if not any(part in row.values for row in rows):
            continue
        widths = [max(row.values.get(part, 0.0), 0.0) for row in rows]
        panel.barh(names, widths, left=left, color=f"C{index}", label=label)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    panel.invert_yaxis()
    panel.set_xlabel("ms in an iteration")
    panel.tick_params(axis="y", labelsize="x-small")
    panel.grid(axis="x", alpha=0.3)
    panel.legend(fontsize="x-small")


def _draw_curves(panel: Axes, rows: Sequence[Row], what: str, over: str) -> None:
    for row in rows:
        panel.plot(row.samples[over], row.samples[what], marker=".", label=row.contender)
    panel.set_title(f"{rows[0].section}\n{rows[0].case}", fontsize="medium")
    panel.set_xlabel(over)
    panel.set_ylabel("accuracy, %" if what == "accuracy" else what)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")
