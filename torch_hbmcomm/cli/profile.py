"""`hbmcomm profile`: shows what communication costs, and writes a trace for Perfetto."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from torch_hbmcomm.profiling import clocks, costs, ranks, trace

_MOST_ROWS = 12


def profile(
    folder: Annotated[Path, typer.Argument(help="Folder with the files rank-N.json.")],
) -> None:
    """Show what the communication of a job costs, and what to change first.

    The job ran with HBMCOMM_PROFILE=FOLDER, or called hbmcomm.profile(FOLDER). Also writes
    FOLDER/trace.json, which https://ui.perfetto.dev opens.
    """
    console = Console(highlight=False)
    try:
        profiles, others = ranks.load(folder)
    except ValueError as error:
        console.print(f"hbmcomm profile: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    aligned = clocks.align(profiles)
    found = costs.costs(profiles, aligned)
    _print_head(console, profiles, aligned)
    for name in others:
        console.print(f"{name} is of another run, and is left out")
    _print_advice(console, found)
    _print_rows(console, found, len(profiles))
    _print_ranks(console, found)
    file = folder / "trace.json"
    trace.write(file, profiles, aligned, found)
    console.print(f"\nTrace for https://ui.perfetto.dev: {file}", soft_wrap=True)


def _print_head(
    console: Console, profiles: list[ranks.RankProfile], aligned: dict[int, clocks.Clock]
) -> None:
    seconds = max(one.end - one.begin for one in profiles) / 1e9
    calls = sum(len(one.operations) for one in profiles)
    nodes = ranks.nodes(profiles)
    console.print(
        f"{len(profiles)} ranks on {nodes} node{'s' * (nodes > 1)}, {seconds:.2f} s, "
        f"{calls:,} operations. {_error(aligned)}",
        soft_wrap=True,
    )
    for one in profiles:
        if one.lost:
            console.print(f"rank {one.rank}: {one.lost:,} earlier operations are not recorded")
        if one.unfinished:
            console.print(f"rank {one.rank}: {one.unfinished} operations have not ended")
    seen = {one.rank for one in profiles}
    for missing in sorted({
        rank for one in profiles for each in one.operations for rank in each.group.ranks
    } - seen):  # fmt: skip
        console.print(f"rank {missing}: no file rank-{missing}.json, so waiting is not known")


def _error(aligned: dict[int, clocks.Clock]) -> str:
    errors = [one.error for one in aligned.values()]
    if None in errors:
        return "No collective joins all machines, so their clocks are not compared."
    if len({one.name for one in aligned.values()}) == 1:
        return "All ranks have one clock."
    worst = max(one for one in errors if one is not None)
    text = f"Times of different machines are compared to {worst / 1e3:,.0f} µs."
    if drift := max(one.drift for one in aligned.values()):
        text += f" Their clocks drift by up to {drift * 1e6:,.1f} µs in a second."
    return text


def _print_advice(console: Console, found: costs.Costs) -> None:
    console.print("\n[bold]What to change first")
    advice = costs.advice(found)
    for number, one in enumerate(advice, 1):
        console.print(f"{number}. {one.text}", markup=False)
    if not advice:
        console.print("Nothing takes 1 % of the time.")


def _print_rows(console: Console, found: costs.Costs, size: int) -> None:
    title = "\nOperations (calls and MiB: of all ranks; times: ms, mean of the ranks)"
    table = Table(title=title, title_justify="left", padding=0)
    for heading in ("operation", "size", "over", "tensors", "data"):
        table.add_column(heading, overflow="fold")
    for heading in ("calls", "MiB", "transit", "hidden", "waiting", "last rank"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows[:_MOST_ROWS]:
        last = costs.slowest(row)
        table.add_row(
            row.kind,
            row.size,
            row.path,
            row.place,
            row.data,
            f"{row.calls:,}",
            f"{row.bytes / 2**20:,.1f}",
            *(f"{one / size / 1e6:,.1f}" for one in (row.transit, row.hidden, row.waiting)),
            f"{last[0]} ({last[1]:.0%})" if last else "-",
        )
    console.print(table)
    if len(found.rows) > _MOST_ROWS:
        console.print(f"{len(found.rows) - _MOST_ROWS} more rows take less time.")


def _print_ranks(console: Console, found: costs.Costs) -> None:
    title = "\nRanks (times: ms; %: of the rank's time)"
    table = Table(title=title, title_justify="left", padding=0)
    for heading in ("rank", "late in", "half in", "late by at least", "at most", "others wait",
                    "waits for ranks", "waits for data"):  # fmt: skip
        table.add_column(heading, justify="right")
    for rank, late in found.late.items():
        whole = found.duration[rank] or 1
        count, least = late.half
        bounds = (least, max(late.late)) if late.late else ()
        table.add_row(
            str(rank),
            f"{late.times:,} of {late.collectives:,}",
            f"{count:,}",
            *((f"{one / 1e6:,.2f}" for one in bounds) if bounds else "--"),
            f"{late.waiting / 1e6:,.1f}",
            f"{found.waiting[rank] / whole:.1%}",
            f"{found.unhidden[rank] / whole:.1%}",
        )
    console.print(table)
