"""A result as a figure, in the shape of the paper's Figs. 6 to 9: a column for each model, bars for
each number of workers; above communication alone, below iterations that overlap it.

REQUIRES: matplotlib, which the extra "bench" installs, and some measurement in the result.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from torch_hbmcomm.bench.async_sgd.contenders import CONTENDERS
from torch_hbmcomm.bench.async_sgd.result import Result, Row, machine_line, rows

_LABELS = {"sequential": "communication, ms", "parallel": "iteration, ms"}


def save(result: Result, path: Path) -> None:
    lines = list(dict.fromkeys((m.section, m.scenario) for m in result.measurements))
    lines.sort(key=lambda line: list(result.sections).index(line[0]))
    models = list(dict.fromkeys(m.model for m in result.measurements))
    figure = Figure(figsize=(3.2 * len(models) + 2, 2.8 * len(lines) + 1), layout="constrained")
    axes = figure.subplots(len(lines), len(models), squeeze=False)
    handles: dict[str, Patch] = {}
    for (section, scenario), panels in zip(lines, axes, strict=True):
        for model, panel in zip(models, panels, strict=True):
            found = [
                m
                for m in result.measurements
                if (m.section, m.scenario, m.model) == (section, scenario, model)
            ]
            if not found:
                panel.remove()
                continue
            handles |= _draw(panel, list(rows(found)))
            panel.set_title(f"{model}, {section}", fontsize="medium")
            panel.set_ylabel(_LABELS[scenario])
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4)
    figure.suptitle(machine_line(result), fontsize="medium")
    figure.savefig(path, dpi=120)


def _draw(panel: Axes, found: Sequence[Row]) -> dict[str, Patch]:
    """In the scenario "parallel" the computation lies over what it hides. Returns the legend."""
    handles: dict[str, Patch] = {}
    took_part = {name for row in found for name in row}
    names = [name for name in [*CONTENDERS, "link"] if name in took_part]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        at = [place for place, row in enumerate(found) if name in row]
        offsets = [place + (index - (len(names) - 1) / 2) * width for place in at]
        heights = [found[place][name].median_ms for place in at]
        color = f"C{list(CONTENDERS).index(name)}" if name in CONTENDERS else "black"
        panel.bar(offsets, heights, width, color=color)
        handles[name] = Patch(color=color)
    first = next(iter(found[0].values()))
    if first.scenario == "parallel":
        panel.axhspan(0, first.compute_ms, color="lightgrey", alpha=0.8, zorder=3)
        handles["computation"] = Patch(color="lightgrey")
    panel.set_xticks(range(len(found)), [str(next(iter(row.values())).workers) for row in found])
    panel.set_xlabel("workers")
    panel.grid(axis="y", alpha=0.3)
    return handles
