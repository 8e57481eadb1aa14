"""A result as tables for the terminal, one for each section."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_hbmcomm.bench.box.result import Measurement, Result, machine_line
from torch_hbmcomm.bench.box.section import Section
from torch_hbmcomm.bench.box.sections import SECTIONS
from torch_hbmcomm.bench.box.verdict import Row, verdicts
from torch_hbmcomm.bench.sizes import format_bytes
from torch_hbmcomm.bench.times import format_time


def render(result: Result) -> RenderableType:
    tables = [
        _table(SECTIONS[name], list(found))
        for name, found in groupby(result.measurements, key=lambda found: found.section)
    ]
    return Group(*tables, *_notes(result))


def rows(found: list[Measurement]) -> Iterator[Row]:
    for _, row in groupby(found, key=lambda one: (one.operation, one.bytes, one.clients)):
        yield {measurement.contender: measurement for measurement in row}


def _table(section: Section, found: list[Measurement]) -> Table:
    """Red: a goal that is missed."""
    names = list(dict.fromkeys(measurement.contender for measurement in found))
    table = Table(title=f"{section.name}: {section.about}", title_justify="left")
    table.add_column("operation")
    table.add_column("size", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    if section.goals:
        table.add_column("goal")
    for row in rows(found):
        first = next(iter(row.values()))
        crowd = f", {first.clients} clients" if first.clients > 1 else ""
        goals = [
            Text(verdict.text, style="" if verdict.reached else "red")
            for verdict in verdicts(section, row)
        ]
        table.add_row(
            first.operation + crowd,
            format_bytes(first.bytes),
            *(_entry(section, row.get(name)) for name in names),
            *([Text("\n").join(goals)] if section.goals else []),
        )
    return table


def _entry(section: Section, found: Measurement | None) -> str:
    if found is None:
        return "-"
    if section.streams > 0:
        return f"{rate(section, found):.3g} GB/s"
    p99 = "" if found.p99_us is None else f", p99 {format_time(found.p99_us)}"
    return format_time(found.median_us) + p99


def rate(section: Section, found: Measurement) -> float:
    """GB/s."""
    return section.streams * found.bytes / found.median_us / 1e3


def _notes(result: Result) -> Iterator[Text]:
    for note in result.notes:
        yield Text(note)
    for name, cause in result.unavailable.items():
        yield Text(f"not measured: {name}: {cause}")
    yield Text(machine_line(result))
