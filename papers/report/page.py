"""The report's page, as Markdown and as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from markdown_it import MarkdownIt

from benchmarks.panels import Panel, save
from papers.report.experiment import Experiment
from torch_hbmcomm.bench.report import machine_line
from torch_hbmcomm.bench.result import Result

_COLUMNS = 3
_HEAD = """<!doctype html>
<meta charset="utf-8"><title>Report</title>
<style>body { font: 16px sans-serif; max-width: 70em; margin: 2em auto }
table { border-collapse: collapse } td, th { padding: .2em .6em; border: 1px solid #ccc }
img { max-width: 100% }</style>
"""


Found = tuple[Experiment, Mapping[str, Result]]
"""An experiment, and the results of its completed runs, by the runs' names."""


def write(folder: Path, found: Sequence[Found], failures: Mapping[str, str], quick: bool) -> Path:
    """Write report.md, report.html and a plot for each experiment. Return the path of report.md.

    failures: causes, by the names of failed runs.
    """
    text = markdown(found, failures, quick)
    page = folder / "report.md"
    page.write_text(text)
    html = MarkdownIt("commonmark").enable("table").render(text)
    (folder / "report.html").write_text(_HEAD + html)
    for experiment, results in found:
        if panels := _panels(experiment, results):
            plot = folder / f"{experiment.name}.png"
            save(panels, min(_COLUMNS, len(panels)), "; ".join(_machines(results)), plot)
    return page


def markdown(found: Sequence[Found], failures: Mapping[str, str], quick: bool) -> str:
    """Return the page's text."""
    lines = ["# The papers' figures, and ours", ""]
    lines += ["The machines differ by section: compare only figures of one section.", ""]
    if quick:
        lines += ["A quick run with small sizes: a check that all runs, without valid times.", ""]
    missing = []
    for experiment, results in found:
        failed = [run.name for run in experiment.runs if run.name in failures]
        if not results and not failed and experiment.runs:
            missing.append(experiment)
            continue
        lines += _section(experiment, results, quick)
        lines += [
            f"- not measured yet: `{run.command(quick)}`"
            for run in experiment.runs
            if run.name not in results and run.name not in failures
        ]
        lines += [f"- Not measured: `{name}`: {failures[name]}" for name in failed]
        lines.append("")
    return "\n".join([*lines, *_missing(missing, quick)])


def _missing(experiments: Sequence[Experiment], quick: bool) -> Iterator[str]:
    """Yield the experiments without results, and the commands that run them."""
    if experiments:
        yield from ("## Not measured yet", "")
    for one in experiments:
        command = f"python -m papers.report {'' if quick else '--full '}--only {one.name}"
        yield f"- {one.name}, {one.figures} ({one.paper}): `{command}`"
    if experiments:
        yield ""


def _panels(experiment: Experiment, results: Mapping[str, Result]) -> Sequence[Panel]:
    return experiment.panels(results) if results else ()


def _machines(results: Mapping[str, Result]) -> list[str]:
    """Return the machines of the results, each once."""
    return list(dict.fromkeys(_machine(result) for result in results.values()))


def _machine(result: Result) -> str:
    return machine_line(replace(result, plan={}))


def _not_measured(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield the contenders and sections that the machine could not run, with the reasons."""
    causes = {
        name: cause for found in results.values() for name, cause in found.unavailable.items()
    }
    yield from (f"- Not measured: {name}: {cause}" for name, cause in causes.items())
    if causes:
        yield ""


def _section(experiment: Experiment, results: Mapping[str, Result], quick: bool) -> Iterator[str]:
    yield f"## {experiment.name}: {experiment.figures}"
    yield ""
    yield f"{experiment.paper}. **{experiment.label.value.capitalize()}.** {experiment.differs}"
    yield ""
    yield from (f"- The paper: {finding}" for finding in experiment.found)
    if results:
        yield from (f"- Here: {answer}" for answer in experiment.answer(results))
    yield ""
    if results or not experiment.runs:
        yield from experiment.table(results).markdown()
        yield ""
    if not results:
        return
    if _panels(experiment, results):
        yield f"![{experiment.figures}]({experiment.name}.png)"
        yield ""
    yield from _not_measured(results)
    machines = _machines(results)
    yield f"{'; '.join(machines)}. Measured by:"
    yield ""
    for run in experiment.runs:
        if run.name in results:
            result = results[run.name]
            where = f" on {_machine(result)}" if len(machines) > 1 else ""
            measured = f"{result.machine['time']}{where}: `{run.command(quick)}`"
            yield f"- {measured} ([JSON]({run.name}.json))"
