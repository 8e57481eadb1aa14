"""A result as tables for the terminal, one for each collective and type."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_hbmcomm.bench.result import Measurement, Result, machine_line
from torch_hbmcomm.bench.sizes import format_bytes
from torch_hbmcomm.bench.times import format_time


def render(result: Result) -> RenderableType:
    tables = [
        _table(result, collective, dtype, list(found))
        for (collective, dtype), found in groupby(
            result.measurements, key=lambda found: (found.collective, found.dtype)
        )
    ]
    return Group(*tables, *_notes(result))


def _table(result: Result, collective: str, dtype: str, found: list[Measurement]) -> Table:
    """Times, and below each how many times the subject's it is; red where that is below 1."""
    taking_part = {measurement.contender for measurement in found}
    names = [name for name in result.contenders if name in taking_part]
    title = (
        f"{collective}, {dtype}" if any(measurement.bytes for measurement in found) else collective
    )
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("size", justify="right")
    for name in names:
        table.add_column(name.replace("-", " "), justify="right")
    for size, row in groupby(found, key=lambda measurement: measurement.bytes):
        medians = {measurement.contender: measurement.median_us for measurement in row}
        table.add_row(
            format_bytes(size) if size else "",
            *(_entry(medians, name, names[0], name in result.references) for name in names),
        )
    return table


def _entry(medians: dict[str, float], name: str, subject: str, reference: bool) -> Text:
    if name not in medians:
        return Text("-", style="dim")
    text = Text(format_time(medians[name]))
    if name != subject and subject in medians:
        ratio = medians[name] / medians[subject]
        style = "dim" if reference or ratio >= 1 else "red"
        text.append(f"\n{ratio:.2f}x", style=style)
    return text


def _notes(result: Result) -> Iterator[Text]:
    names = list(result.contenders)
    if len(names) > 1:
        yield Text(
            f"x: of {names[0]}, or of the first in a table without it; red: faster than that"
        )
    for name, about in result.contenders.items():
        yield Text(f"{name}: {about}")
    for name, cause in result.unavailable.items():
        yield Text(f"not measured: {name}: {cause}")
    yield Text(machine_line(result.machine, result.ranks, result.rounds))
