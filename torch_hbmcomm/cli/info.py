"""`hbmcomm info`: what is on this machine, or in a process, and how each was found."""

import json as json_module
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_hbmcomm.bench.sizes import format_bytes
from torch_hbmcomm.cli import process
from torch_hbmcomm.cli.probes import Finding, State, look

_STYLES = {State.OK: "", State.WARNING: "yellow", State.BROKEN: "red"}


def info(
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    pid: Annotated[
        int | None, typer.Option(min=1, help="Look at the memory of this process instead.")
    ] = None,
) -> None:
    """What is on this machine, and how each was found; or what memory a running process has.

    Exit status: 0 when the backend hbm can work here, 1 when it cannot. With --pid, 1 when nothing
    can be said about that process.
    """
    if pid is not None:
        _show_process(pid, json)
        return
    findings = look()
    usable = all(finding.state is not State.BROKEN for finding in findings)
    if json:
        typer.echo(json_module.dumps(_document(findings, usable), indent=1))
    else:
        Console().print(_table(findings, usable))
    raise typer.Exit(0 if usable else 1)


def _document(findings: list[Finding], usable: bool) -> dict[str, object]:
    """{"usable": bool, name of a finding: {"state", "value", "found_by", "remedy", ...}, ...}"""
    document: dict[str, object] = {"usable": usable}
    for finding in findings:
        document[finding.name] = {
            "state": finding.state.value,
            "value": finding.value,
            "found_by": finding.found_by,
            "remedy": finding.remedy,
            **finding.data,
        }
    return document


def _table(findings: list[Finding], usable: bool) -> Table:
    table = Table(show_lines=True, expand=True)
    table.add_column("")
    table.add_column("found", ratio=3, overflow="fold")
    table.add_column("how", ratio=2, overflow="fold")
    table.add_column("what to do", ratio=2, overflow="fold")
    for finding in findings:
        cells = (finding.name, finding.value, finding.found_by, finding.remedy)
        table.add_row(*map(Text, cells), style=_STYLES[finding.state])
    table.caption = "hbm can work here" if usable else "hbm cannot work here: see the red rows"
    return table


def _show_process(pid: int, json: bool) -> None:
    try:
        found = process.inspect(pid)
    except process.InspectionError as error:
        typer.echo(f"hbmcomm info: {error}", err=True)
        raise typer.Exit(1) from error
    if json:
        typer.echo(json_module.dumps(asdict(found), indent=1))
        return
    console = Console()
    console.print(_segments_table(found))
    for placement, nodes in found.placed.items():
        console.print(Text(f"private memory placed by {placement}: {_by_node(nodes)}"))
    if found.settings:
        console.print(Text(" ".join(f"{name}={text}" for name, text in found.settings.items())))


def _segments_table(found: process.Process) -> Table:
    table = Table(title=Text(f"process {found.pid}: {found.command}"))
    for column in ("segment", "policy", "placement", "address space", "held", "touched", "where"):
        table.add_column(column, overflow="fold")
    for segment in [*found.segments, *found.neighbours]:
        held, touched = segment.held_bytes, format_bytes(segment.resident_bytes)
        if segment.huge_bytes:
            touched += f", {format_bytes(segment.huge_bytes)} on huge pages"
        table.add_row(
            _whose(segment, found),
            segment.policy,
            segment.placement,
            format_bytes(segment.size_bytes),
            "" if held is None else format_bytes(held),
            touched,
            _by_node(segment.by_node),
        )
    table.caption = f"neighbours whose segments are mapped: {len(found.neighbours)}"
    return table


def _whose(segment: process.Segment, found: process.Process) -> str:
    if segment.held_bytes is None:
        return f"of neighbour {segment.owner or '(unknown)'}"
    return "own" if segment.owner == found.pid else f"shared with its parent {segment.owner}"


def _by_node(nodes: Mapping[int, int]) -> str:
    return ", ".join(f"node {node}: {format_bytes(size)}" for node, size in sorted(nodes.items()))
