"""The report's page, as Markdown and as HTML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

from benchmarks.markdown import Table
from benchmarks.panels import Panel, save
from papers.report.experiment import Experiment
from papers.report.verdicts import PAPERS, Claim, Outcome, Verdict
from torch_hbmcomm.bench.report import machine_line
from torch_hbmcomm.bench.result import Result

_COLUMNS = 3
_VERDICTS = "Verdicts"
_UNMEASURED = "Not measured yet"
_ABOUT = (
    "The claims against MPI that sleeps are ours; the papers have the others. The figures in the"
    " column *here* and most verdicts are computed from the records. A ratio within 10 % of 1"
    " counts as equal. A cell is one measured case, such as a collective with a size and a number"
    " of processes. *hbm* is this library. *The box* is its memory box, or the Soft Memory Box in"
    " the findings of Ahn et al. A section ends in the verdicts on its claims, with the rules that"
    " decide them."
)
_MEANINGS = {
    Verdict.HOLDS: "our figures agree with the finding",
    Verdict.IN_PART: "they agree in the part or in the cells that the claim's rule names",
    Verdict.FAILS: "they do not agree",
    Verdict.NOT_MEASURABLE: "hardware or software is missing",
    Verdict.NOT_MEASURED: "no record has the figures",
}
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
    (folder / "report.html").write_text(_HEAD + _html(text))
    for experiment, results in found:
        if panels := _panels(experiment, results):
            plot = folder / f"{experiment.name}.png"
            save(panels, min(_COLUMNS, len(panels)), "; ".join(_machines(results)), plot)
    return page


def _html(text: str) -> str:
    """Render the page. Headings have the anchors that GitHub gives them."""
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", _anchor(inline.content))
    return str(parser.renderer.render(tokens, parser.options, {}))


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _heading(experiment: Experiment) -> str:
    return f"{experiment.name}: {experiment.figures}"


def markdown(found: Sequence[Found], failures: Mapping[str, str], quick: bool) -> str:
    """Return the page's text."""
    lines = ["# The papers' figures, and ours", ""]
    lines += ["The machines differ by section: compare only figures of one section.", ""]
    if quick:
        lines += ["A quick run with small sizes: a check that all runs, without valid times.", ""]
    missing = [
        experiment
        for experiment, results in found
        if experiment.runs
        and not results
        and not any(run.name in failures for run in experiment.runs)
    ]
    lines += _verdicts(found, missing, quick)
    for experiment, results in found:
        failed = [run.name for run in experiment.runs if run.name in failures]
        if experiment in missing:
            continue
        lines += _section(experiment, results, quick)
        lines += [
            f"- not measured yet: `{run.command(quick)}`"
            for run in experiment.runs
            if run.name not in results and run.name not in failures
        ]
        lines += [f"- Not measured: `{name}`: {failures[name]}" for name in failed]
        lines.append("")
        lines += _conclusion(experiment, results, quick)
    return "\n".join([*lines, *_missing(missing, quick)])


Judged = tuple[Claim, Outcome, Experiment]


def _judged(experiment: Experiment, results: Mapping[str, Result], quick: bool) -> list[Judged]:
    return [
        (claim, experiment.outcome(claim, results, quick), experiment)
        for claim in experiment.claims
    ]


def _verdicts(found: Sequence[Found], missing: Sequence[Experiment], quick: bool) -> Iterator[str]:
    """Yield the table of all claims, by paper."""
    rows = [row for experiment, results in found for row in _judged(experiment, results, quick)]
    rows.sort(key=lambda row: PAPERS.index(row[0].paper))
    counts = Counter(outcome.verdict for _, outcome, _ in rows)
    yield f"## {_VERDICTS}"
    yield ""
    yield f"The table has {len(rows)} claims. {_ABOUT}"
    yield ""
    yield from Table(
        ["verdict", "claims", "meaning"],
        [[one.value, str(counts[one]), _MEANINGS[one]] for one in Verdict if counts[one]],
    ).markdown()
    yield ""
    lines = []
    for claim, outcome, experiment in rows:
        anchor = _anchor(_UNMEASURED if experiment in missing else _heading(experiment))
        line = [claim.paper.short, claim.item, claim.finding, outcome.here or "-"]
        line += [f"**{outcome.verdict.value}**", outcome.reason]
        lines.append([*line, f"[{experiment.name}](#{anchor})"])
    heading = ["paper", "figure, table or finding", "the paper", "here", "verdict", "why"]
    yield from Table([*heading, "section"], lines).markdown()
    yield ""
    yield "These parts of the papers have no result, so they have no verdict:"
    yield ""
    yield from (f"- {paper.short}: {paper.designs}" for paper in PAPERS)
    yield ""


def _conclusion(
    experiment: Experiment, results: Mapping[str, Result], quick: bool
) -> Iterator[str]:
    """Yield the verdicts on an experiment's claims, which end its section."""
    yield "Verdicts:"
    yield ""
    for claim, outcome, _ in _judged(experiment, results, quick):
        words = [f"**{claim.paper.short}, {claim.item}: {outcome.verdict.value}.**"]
        words.append(f"The paper: {claim.finding}")
        words += [f"Here: {outcome.here}"] if outcome.here else []
        words.append(outcome.reason)
        words += [f"({claim.rule})"] if claim.rule else []
        yield f"- {' '.join(words)}"
    yield ""


def _missing(experiments: Sequence[Experiment], quick: bool) -> Iterator[str]:
    """Yield the experiments without results, and the commands that run them."""
    if experiments:
        yield from (f"## {_UNMEASURED}", "")
    for one in experiments:
        command = f"python -m papers.report {'' if quick else '--full '}--only {one.name}"
        yield f"- {one.name}, {one.figures} ({one.papers}): `{command}`"
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
    yield f"## {_heading(experiment)}"
    yield ""
    yield f"{experiment.papers}. **{experiment.label.value.capitalize()}.** {experiment.differs}"
    yield ""
    if results and (answers := experiment.answer(results)):
        yield from (f"- Here: {answer}" for answer in answers)
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
            commit = result.machine.get("commit")
            where += f", commit {commit[:12]}" if commit else ""
            measured = f"{result.machine['time']}{where}: `{run.command(quick)}`"
            yield f"- {measured} ([JSON]({run.name}.json))"
