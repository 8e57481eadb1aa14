"""A result as a table for the terminal."""

from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_hbmcomm.bench.result import Result
from torch_hbmcomm.bench.sizes import format_bytes


def render(result: Result) -> RenderableType:
    """One row for each collective and size; red where the subject is slower than another."""
    subject = result.subject
    others = [name for name in result.contenders if name != subject]
    table = Table()
    table.add_column("collective")
    table.add_column("size", justify="right")
    for name in result.contenders:
        table.add_column(f"{name} µs", justify="right")
    for name in others:
        table.add_column(f"{name}/{subject}", justify="right")

    for collective, rows in groupby(_rows(result).items(), key=lambda row: row[0][0]):
        for (_, size), medians in rows:
            ratios = [medians[name] / medians[subject] for name in others]
            table.add_row(
                collective,
                format_bytes(size) if size else "",
                *(f"{medians[name]:,.1f}" for name in result.contenders),
                *(f"{ratio:.2f}" for ratio in ratios),
                style="red" if any(ratio < 1 for ratio in ratios) else None,
            )
        table.add_section()
    return Group(table, Text(machine_line(result)))


def machine_line(result: Result) -> str:
    machine = result.machine
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {result.ranks} ranks, "
        f"median of {result.rounds} rounds, torch {machine['torch']}"
    )


def _rows(result: Result) -> dict[tuple[str, int], dict[str, float]]:
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for found in result.measurements:
        rows.setdefault((found.collective, found.bytes), {})[found.contender] = found.median_us
    return rows
