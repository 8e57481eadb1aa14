"""A result on the terminal or in a file: tables, notes, and the commands' common options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_hbmcomm.bench.result import Measurement, Result, Section
from torch_hbmcomm.sizes import format_bytes

Row = Mapping[str, Measurement]
"""The measurements of one row of a table, by contender."""

Choice = Annotated[
    str, typer.Option(help="Names separated by commas; all: those that can run here.")
]
Ranks = Annotated[int, typer.Option(min=2, help="Processes, all on this machine.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each contender, and as many alone.")]
Lanes = Annotated[int, typer.Option(min=1, help="Connections of tcp.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="That accumulate on the box.", show_default="one for each core"),
]
Json = Annotated[
    Path | None, typer.Option(dir_okay=False, writable=True, help="Also write the figures.")
]


def say(what: str) -> None:
    """Tell the user on a terminal the next thing to be measured."""
    if sys.stderr.isatty():
        typer.echo(f"measuring {what} ...", err=True)


def names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def given(**options: Any) -> dict[str, Any]:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def fail(message: str) -> NoReturn:
    typer.echo(f"hbmcomm bench: {message}", err=True)
    raise typer.Exit(1)


def check_file(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no such directory")


def show(shown: RenderableType) -> None:
    """Print tables, as wide as the terminal, and in a pipe or a file 160 columns wide."""
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


def finish(shown: RenderableType, result: Result, json: Path | None) -> None:
    """Print tables as show() does, and write the JSON."""
    show(shown)
    if json is not None:
        json.write_text(result.to_json())


def rows(found: Sequence[Measurement], *without: str) -> list[Row]:
    """Group measurements into rows, in the order in which they were measured. without: names in
    Measurement.of whose values do not separate rows."""
    grouped: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    for one in found:
        key = tuple(value for name, value in one.of.items() if name not in without)
        grouped.setdefault(key, {})[one.contender] = one
    return list(grouped.values())


def table_of(title: str, headings: Sequence[str], lines: bool = False) -> Table:
    """Make a table of numbers, with names in the first column."""
    table = Table(title=title, title_justify="left", show_lines=lines)
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if column else "left")
    return table


def compared(
    title: str,
    found: Sequence[Measurement],
    headings: Mapping[str, Callable[[Measurement], str]],
    entry: Callable[[Row, Measurement], Text | str],
    order: Sequence[str] = (),
    more: Mapping[str, Callable[[Row], Text | str]] | None = None,
) -> Table:
    """Make a table with a line for each row and a column for each contender.

    Args:
        headings: columns before the contenders, each with the function of its entries
        entry: the function that makes the entry of a contender
        order: contenders in the order of their columns; other contenders come last, in the order of
            measurement
        more: columns after the contenders, each with the function of its entries
    """
    taking_part = list(dict.fromkeys(one.contender for one in found))
    columns = [name for name in order if name in taking_part]
    columns += [name for name in taking_part if name not in columns]
    more = more or {}
    titles = [*headings, *(name.replace("-", " ") for name in columns), *more]
    table = table_of(title, titles, lines=True)
    for row in rows(found):
        first = next(iter(row.values()))
        table.add_row(
            *(heading(first) for heading in headings.values()),
            *(entry(row, row[name]) if name in row else Text("-", style="dim") for name in columns),
            *(write(row) for write in more.values()),
        )
    return table


def times(found: Measurement) -> str:
    """Format median, minimum and mean of single calls."""
    if found.summary.n == 1:
        return format_time(found.median)
    least, mean = format_time(found.minimum), format_time(found.mean)
    return f"{format_time(found.median)}\nmin {least}\nmean {mean}"


def compared_with(found: Measurement, subject: Measurement | None, reference: bool) -> Text:
    """Format the times of `found`, and the ratio of its median to the median of `subject`, if there
    is one. The ratio is red if it is below 1, unless `found` is a `reference`.

    If interleaving slows the contender, append its median in rounds without the others ("alone"),
    and the ratio of this median to the subject's interleaved median.
    """
    text = Text(times(found))
    if found is subject:
        subject = None
    if subject is not None:
        value = found.median / subject.median
        style = "dim" if reference or value >= 1 else "red"
        text.append(f"\n{value:.2f}x", style=style)
    if found.disturbed and found.alone is not None:
        alone, style = f"\nalone {format_time(found.alone.median)}", "yellow"
        if subject is not None:
            value = found.alone.median / subject.median
            alone, style = f"{alone}, {value:.2f}x", "yellow" if value >= 1 else "red"
        text.append(alone, style=style)
    return text


def rate(section: Section, found: Measurement) -> float:
    """Return the rate in GB/s."""
    return float(section.streams * found.of["bytes"] / found.median / 1e3)


def speed(section: Section) -> Callable[[Row, Measurement], Text]:
    """Return the function that makes a section's entries: rates in GB/s and times, or times only if
    the section's `streams` is 0."""

    def entry(row: Row, found: Measurement) -> Text:
        if section.streams == 0:
            tail = found.summary.p99
            p99 = "" if tail is None else f"\np99 {format_time(tail)}"
            return compared_with(found, None, False).append(p99)
        return Text(f"{rate(section, found):.3g} GB/s\n").append_text(
            compared_with(found, None, False)
        )

    return entry


def size(found: Measurement) -> str:
    return format_bytes(found.of["bytes"]) if found.of.get("bytes") else ""


def notes(result: Result) -> Iterator[Text]:
    if any(one.samples and one.unit == "us" for one in result.measurements):
        yield Text(
            "A sample is a single call, or the mean of as many as fill 10 µs; min and mean are of "
            "the same samples as the median. x is a ratio of medians."
        )
    disturbed = dict.fromkeys(one.contender for one in result.measurements if one.disturbed)
    if disturbed:
        yield Text(
            f"alone: measured by itself, if that is better by a tenth or more than interleaved "
            f"({', '.join(disturbed)})"
        )
    for name, about in result.contenders.items():
        if about:
            yield Text(f"{name}: {about}")
    for note in result.notes:
        yield Text(note)
    for name, cause in result.unavailable.items():
        yield Text(f"not measured: {name}: {cause}")
    yield Text(machine_line(result))


def machine_line(result: Result) -> str:
    found = result.machine
    line = f"{found['cpu']}, {found['cores']} cores"
    if "ranks" in result.plan:
        line += f", {result.plan['ranks']} ranks"
    if "rounds" in result.plan:
        line += f", {result.plan['rounds']} rounds"
    return line + (f", torch {found['torch']}" if found.get("torch") else "")


def group(tables: Sequence[RenderableType], result: Result) -> Group:
    return Group(*tables, *notes(result))


def format_time(microseconds: float) -> str:
    """Format a time with three significant digits: "9.87 µs", "12.3 ms", "1.05 s"."""
    for unit, factor in (("µs", 1.0), ("ms", 1e-3), ("s", 1e-6)):
        value = microseconds * factor
        if value < 999.5 or unit == "s":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
