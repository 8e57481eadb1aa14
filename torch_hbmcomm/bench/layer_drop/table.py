"""A result as tables for the terminal, one for each section and case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_hbmcomm.bench.layer_drop.columns import COLUMNS
from torch_hbmcomm.bench.layer_drop.result import Result, machine_line
from torch_hbmcomm.bench.layer_drop.section import Row, cases
from torch_hbmcomm.bench.layer_drop.sections import SECTIONS
from torch_hbmcomm.bench.report import line, table_of


def render(result: Result) -> RenderableType:
    return Group(*_parts(result))


def _parts(result: Result) -> Iterator[RenderableType]:
    for name in result.sections:
        section = SECTIONS[name]
        rows = [row for row in result.rows if row.section == name]
        if rows:
            yield Text(f"{name}: {section.about}", style="bold")
        for case, found in cases(rows).items():
            yield _table(case, list(found.values()))
        yield from (line(verdict) for verdict in section.verdicts(rows))
    for name, cause in result.unavailable.items():
        yield Text(f"not measured: {name}: {cause}")
    yield Text(machine_line(result))


def _table(case: str, rows: Sequence[Row]) -> Table:
    names = [name for name in COLUMNS if any(name in row.values for row in rows)]
    table = table_of(case, ["", *(COLUMNS[name].heading for name in names)])
    for row in rows:
        table.add_row(row.contender, *(_entry(row, name) for name in names))
    return table


def _entry(row: Row, name: str) -> str:
    return COLUMNS[name].shown(row.values[name]) if name in row.values else "-"
