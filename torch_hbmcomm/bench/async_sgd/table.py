"""A result as tables for the terminal, one for each section and scenario."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_hbmcomm.bench.async_sgd.contenders import CONTENDERS
from torch_hbmcomm.bench.async_sgd.result import Measurement, Result, Row, machine_line, rows
from torch_hbmcomm.bench.async_sgd.section import Section
from torch_hbmcomm.bench.async_sgd.sections import SECTIONS
from torch_hbmcomm.bench.report import line
from torch_hbmcomm.bench.sizes import format_bytes
from torch_hbmcomm.bench.times import format_time

_TITLES = {
    "sequential": "communication in an iteration, after the computation",
    "parallel": "an iteration whose communication overlaps the next one's computation, and in "
    "brackets what of it is not hidden",
}
_RATIOS = (("MPI", "hbm shm"), ("MPI", "hbm shm in place"), ("MPI tcp", "hbm tcp"))


def render(result: Result) -> RenderableType:
    return Group(*_parts(result))


def _parts(result: Result) -> Iterator[RenderableType]:
    for name, section in SECTIONS.items():
        for scenario, goals in section.goals.items():
            found = list(
                rows(
                    [
                        measurement
                        for measurement in result.measurements
                        if (measurement.section, measurement.scenario) == (name, scenario)
                    ]
                )
            )
            if found:
                yield _table(section, scenario, found)
                for goal in goals:
                    verdict = goal(found)
                    if verdict is not None:
                        yield line(verdict)
        trainings = [one for one in result.trainings if one.section == name]
        if trainings:
            yield from section.render(trainings)
            yield from (line(verdict) for verdict in section.verdicts(trainings))
    for note in result.notes:
        yield Text(note)
    for who, cause in result.unavailable.items():
        yield Text(f"not measured: {who}: {cause}")
    yield Text(machine_line(result))


def _table(section: Section, scenario: str, found: list[Row]) -> Table:
    took_part = {name for row in found for name in row}
    names = [name for name in [*CONTENDERS, "link"] if name in took_part]
    ratios = [pair for pair in _RATIOS if took_part.issuperset(pair)]
    table = Table(
        title=f"{section.name}, {scenario}: {section.about}; {_TITLES[scenario]}",
        title_justify="left",
    )
    table.add_column("model")
    for heading in ("size", "compute", "workers", *names):
        table.add_column(heading, justify="right")
    if scenario == "sequential":
        for rival, subject in ratios:
            table.add_column(f"{rival} /\n{subject}", justify="right")
    for row in found:
        first = next(iter(row.values()))
        cells = [_entry(row.get(name)) for name in names]
        if scenario == "sequential":
            cells += [_ratio(row, *pair) for pair in ratios]
        table.add_row(
            first.model,
            format_bytes(first.bytes),
            format_time(first.compute_ms * 1e3),
            str(first.workers),
            *cells,
        )
    return table


def _entry(found: Measurement | None) -> str:
    if found is None:
        return "-"
    time = format_time(found.median_ms * 1e3)
    if found.scenario == "parallel":
        hidden = found.not_hidden_ms == 0
        time += " (none)" if hidden else f" ({format_time(found.not_hidden_ms * 1e3)})"
    return time


def _ratio(row: Row, rival: str, subject: str) -> str:
    if rival not in row or subject not in row:
        return "-"
    return f"{row[rival].median_ms / row[subject].median_ms:.2f}"
