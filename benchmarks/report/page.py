"""The report's page, as Markdown and as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from markdown_it import MarkdownIt

from benchmarks.panels import save
from benchmarks.report.experiment import Experiment
from torch_hbmcomm.bench.report import machine_line
from torch_hbmcomm.bench.result import Result

_COLUMNS = 3
_HEAD = """<!doctype html>
<meta charset="utf-8"><title>Report</title>
<style>body { font: 16px sans-serif; max-width: 70em; margin: 2em auto }
table { border-collapse: collapse } td, th { padding: .2em .6em; border: 1px solid #ccc }
img { max-width: 100% }</style>
"""


def write(
    folder: Path,
    results: Sequence[tuple[Experiment, Mapping[str, Result]]],
    failures: Mapping[str, str],
    quick: bool,
) -> Path:
    """Write report.md, report.html and a plot for each experiment; return the first's path.

    results: the experiments in order, each with the results of its runs that there are.
    failures: by the names of the runs that there are not, why.
    """
    lines = ["# The papers' figures, and ours", ""]
    if quick:
        lines += ["A quick run, with small sizes: it shows that all works, and no speed.", ""]
    for experiment, found in results:
        lines += _section(experiment, found, folder)
        lines += [
            f"Not measured: `{run.name}`: {failures[run.name]}"
            for run in experiment.runs
            if run.name in failures
        ]
        lines.append("")
    text = "\n".join(lines)
    page = folder / "report.md"
    page.write_text(text)
    html = MarkdownIt("commonmark").enable("table").render(text)
    (folder / "report.html").write_text(_HEAD + html)
    return page


def _section(experiment: Experiment, results: Mapping[str, Result], folder: Path) -> Iterator[str]:
    yield f"## {experiment.name}: {experiment.figures}"
    yield ""
    yield f"{experiment.paper}. **{experiment.label.value.capitalize()}.** {experiment.differs}"
    yield ""
    yield from (f"- The paper: {finding}" for finding in experiment.found)
    yield ""
    if not results:
        return
    yield from experiment.table(results).markdown()
    yield ""
    plot = folder / f"{experiment.name}.png"
    panels = experiment.panels(results)
    first = next(iter(results.values()))
    machine = machine_line(replace(first, plan={}))
    if panels:
        save(panels, min(_COLUMNS, len(panels)), machine, plot)
        yield f"![{experiment.figures}]({plot.name})"
        yield ""
    yield f"{machine}, {first.machine['time']}. From"
    yield ", ".join(f"[{name}.json]({name}.json)" for name in results) + "."
    yield ""
