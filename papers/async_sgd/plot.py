"""Plots in the form of the paper's Figs. 6 to 9.

There is a column for each model, and bars for each number of workers. The sections node and link
each have a row for each measured scenario: communication alone, or iterations whose communication
overlaps computation.
"""

from benchmarks.panels import Panel
from papers.async_sgd.contenders import CONTENDERS
from papers.async_sgd.goals import LINK
from torch_hbmcomm.bench.report import rows
from torch_hbmcomm.bench.result import Result

_LABELS = {"sequential": "communication, ms", "parallel": "iteration, ms"}


def panels(result: Result) -> tuple[list[Panel], int]:
    """Return the panels and the number of columns."""
    found = [one for one in result.measurements if "scenario" in one.of]
    models = list(dict.fromkeys(one.of["model"] for one in found))
    lines = dict.fromkeys((one.of["section"], one.of["scenario"]) for one in found)
    shown = []
    for section, scenario in lines:
        for model in models:
            wanted = (section, scenario, model)
            own = [
                one
                for one in found
                if (one.of["section"], one.of["scenario"], one.of["model"]) == wanted
            ]
            panel = Panel(f"{model}, {section}", "workers", _LABELS[scenario])
            table = rows(own)
            panel.labels = [str(next(iter(row.values())).of["workers"]) for row in table]
            for name in (*CONTENDERS, LINK):
                if any(name in row for row in table):
                    panel.bars[name] = [row[name].median if name in row else 0.0 for row in table]
            if own and scenario == "parallel":
                panel.shaded = own[0].of["compute_ms"]
            shown.append(panel)
    return shown, len(models)
