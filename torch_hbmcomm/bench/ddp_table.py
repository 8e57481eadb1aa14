"""A result of DistributedDataParallel as tables for the terminal, one for each model."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_hbmcomm.bench.ddp_result import ALLREDUCE, STEP, WITHOUT, Result
from torch_hbmcomm.bench.result import machine_line
from torch_hbmcomm.bench.times import format_time

_COLUMNS = (
    "step",
    "",
    "without communication",
    "communication adds",
    "allreduce alone",
    "of it hidden",
)


def render(result: Result) -> RenderableType:
    tables = [_table(result, model) for model in result.models]
    return Group(*tables, Text(machine_line(result.machine, result.ranks, result.rounds)))


def _table(result: Result, model: str) -> Table:
    table = Table(title=f"{model}: {result.models[model]}", title_justify="left")
    table.add_column("backend")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    subject = result.median_us(model, result.contenders[0], STEP)
    for contender in result.contenders:
        step, without, alone = (
            result.median_us(model, contender, phase) for phase in (STEP, WITHOUT, ALLREDUCE)
        )
        ratio = step / subject
        hidden = max(0.0, 1 - (step - without) / alone)
        table.add_row(
            contender,
            format_time(step),
            Text(f"{ratio:.2f}x", style="red" if ratio < 1 else ""),
            format_time(without),
            format_time(step - without),
            format_time(alone),
            f"{hidden:.0%}",
        )
    return table
