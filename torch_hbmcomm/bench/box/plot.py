"""A result as a figure: a column for each section that has rates, a line for each contender.

REQUIRES: matplotlib, which the extra "bench" installs, and such a section in the result.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torch_hbmcomm.bench.box.result import Measurement, Result, machine_line
from torch_hbmcomm.bench.box.section import Section
from torch_hbmcomm.bench.box.sections import SECTIONS
from torch_hbmcomm.bench.box.table import rate
from torch_hbmcomm.bench.sizes import format_bytes

_COLUMNS = 4


def panels(result: Result) -> list[tuple[str, str]]:
    """Section and operation, where several sizes or numbers of clients make a curve."""
    found = [m for m in result.measurements if SECTIONS[m.section].streams > 0]
    points: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for measurement in found:
        key = (measurement.section, measurement.operation)
        points.setdefault(key, set()).add((measurement.bytes, measurement.clients))
    return [key for key, at in points.items() if len(at) > 1]


def save(result: Result, path: Path) -> None:
    wanted = panels(result)
    lines = -(-len(wanted) // _COLUMNS)
    columns = min(_COLUMNS, len(wanted))
    figure = Figure(figsize=(4.2 * columns, 3.4 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for (section, operation), panel in zip(wanted, axes, strict=False):
        found = [
            measurement
            for measurement in result.measurements
            if (measurement.section, measurement.operation) == (section, operation)
        ]
        _draw(panel, SECTIONS[section], operation, found)
    for empty in axes[len(wanted) :]:
        empty.remove()
    figure.suptitle(machine_line(result), fontsize="medium", wrap=True)
    figure.savefig(path, dpi=120)


def _draw(panel: Axes, section: Section, operation: str, found: list[Measurement]) -> None:
    by_clients = len({measurement.clients for measurement in found}) > 1
    for name in dict.fromkeys(measurement.contender for measurement in found):
        own = [measurement for measurement in found if measurement.contender == name]
        at = [str(m.clients) if by_clients else format_bytes(m.bytes) for m in own]
        style = "-" if name.startswith("hbm") else "--"
        panel.plot(at, [rate(section, m) for m in own], style, marker=".", label=name)
    panel.tick_params(axis="x", labelsize="x-small")
    panel.set_ylim(bottom=0)
    panel.set_title(f"{section.name}: {operation}")
    panel.set_xlabel("clients" if by_clients else "size")
    panel.set_ylabel("GB/s")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")
