"""Plots of three kinds.

- the parts of an iteration's time, as in the paper's Figs. 9 and 14
- the time that the hook adds to an iteration
- loss and accuracy over steps and over time, as in the paper's Figs. 5 to 8
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.panels import Panel
from torch_hbmcomm.bench.result import Measurement, Result

_PARTS = {
    "compute_ms": "compute",
    "worker_ms": "worker's compute",
    "server_ms": "server's compute",
    "communication_ms": "communication",
}
_CURVES = tuple((what, over) for over in ("steps", "seconds") for what in ("loss", "accuracy"))
_LINES = 2


def panels(result: Result) -> tuple[list[Panel], int]:
    """Return the panels and the number of columns."""
    cases: dict[tuple[str, str], list[Measurement]] = {}
    for one in result.measurements:
        cases.setdefault((one.of["section"], one.of["case"]), []).append(one)
    titled = {f"{section}\n{case}": rows for (section, case), rows in cases.items()}
    shown = []
    for title, rows in titled.items():
        if parted := [one for one in rows if "communication_ms" in one.values]:
            shown.append(_parts(title, parted))
        elif added := [one for one in rows if "extra_share" in one.values]:
            shown.append(_added(title, added))
    for title, rows in titled.items():
        if learned := [one for one in rows if "accuracy" in one.curves]:
            shown += [_curves(title, learned, what, over) for what, over in _CURVES]
    return shown, -(-len(shown) // _LINES)


def _parts(title: str, rows: Sequence[Measurement]) -> Panel:
    panel = Panel(title, "ms in an iteration", stacked=True)
    panel.labels = [one.contender for one in rows]
    for part, label in _PARTS.items():
        if any(part in one.values for one in rows):
            panel.bars[label] = [max(one.values.get(part, 0.0), 0.0) for one in rows]
    return panel


def _added(title: str, rows: Sequence[Measurement]) -> Panel:
    panel = Panel(title, "% added to an iteration", stacked=True)
    panel.labels = [one.contender for one in rows]
    panel.bars["added"] = [1e2 * one.values["extra_share"] for one in rows]
    return panel


def _curves(title: str, rows: Sequence[Measurement], what: str, over: str) -> Panel:
    panel = Panel(title, over, "accuracy, %" if what == "accuracy" else what)
    for one in rows:
        panel.lines[one.contender] = (list(one.curves[over]), list(one.curves[what]), "-")
    return panel
