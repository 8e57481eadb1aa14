"""The values of rows, and the tables that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from papers.layer_drop.rows import cases
from torch_hbmcomm.bench.report import format_time, table_of
from torch_hbmcomm.bench.result import Measurement


@dataclass(frozen=True)
class Column:
    heading: str
    shown: Callable[[float], str]


def _milliseconds(value: float) -> str:
    """Format a time, or a difference of times. A difference that is not positive is "none"."""
    return format_time(value * 1e3) if value > 0 else "none"


def _seconds(value: float) -> str:
    return format_time(value * 1e6)


COLUMNS = {
    # section pass
    "pass_ms": Column("a pass", _milliseconds),
    "gb_s": Column("traffic", "{:.1f} GB/s".format),
    # section threshold
    "time_ms": Column("time", _milliseconds),
    # sections ddp and server; means over iterations
    "worker_ms": Column("worker's\ncompute", _milliseconds),
    "server_ms": Column("server's\ncompute", _milliseconds),
    "compute_ms": Column("compute", _milliseconds),
    "communication_ms": Column("communication", _milliseconds),
    "iteration_ms": Column("iteration", _milliseconds),
    "iteration_share": Column("iteration,\nof plain's", "{:.1%}".format),
    "crossed_mb": Column("over the link,\neach way", "{:.1f} MB".format),
    "up_mb": Column("to the\nserver", "{:.1f} MB".format),
    "down_mb": Column("from the\nserver", "{:.1f} MB".format),
    "counted_share": Column("bytes,\nas counted", "{:.1%}".format),
    "bytes_share": Column("bytes over the link,\nof plain's", "{:.1%}".format),
    "time_share": Column("communication,\nof plain's", "{:.1%}".format),
    # sections training and server-training; means over seeds
    "accuracy": Column("accuracy\nat the end", "{:.2f} %".format),
    "points": Column("beside\nplain's", "{:+.2f}".format),
    "loss": Column("loss\nat the end", "{:.4f}".format),
    "seconds": Column("time", _seconds),
    "target_seconds": Column("time to plain's\naccuracy - 0.5", _seconds),
    "sooner": Column("sooner", "{:.2f}x".format),
    # sections pass and break-even
    "extra_ms": Column("extra compute", _milliseconds),
    "extra_share": Column("of forward\nand backward", "{:.2%}".format),
    "gflop": Column("operations", "{:.1f} GFlop".format),
    "gflop_s": Column("at", "{:.0f} GFlop/s".format),
    "saved_mb": Column("not sent", "{:.1f} MB".format),
    "break_even_gbit_s": Column("does not pay\nabove", "{:.2f} Gbit/s".format),
}


def tables(about: str, found: Sequence[Measurement]) -> Iterator[RenderableType]:
    """Yield the tables of one section, one for each case."""
    yield Text(f"{found[0].of['section']}: {about}", style="bold")
    for case, rows in cases(found).items():
        yield _table(case, list(rows.values()))


def _table(case: str, rows: Sequence[Measurement]) -> Table:
    names = [name for name in COLUMNS if any(name in row.values for row in rows)]
    table = table_of(case, ["", *(COLUMNS[name].heading for name in names)])
    for row in rows:
        table.add_row(row.contender, *(_entry(row, name) for name in names))
    return table


def _entry(row: Measurement, name: str) -> str:
    return COLUMNS[name].shown(row.values[name]) if name in row.values else "-"
