"""`hbmcomm info`: shows this machine's hardware and libraries, and how each was found."""

import json as json_module
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_hbmcomm.cli.probes import Finding, ProbeState, run_probes

_STYLES = {ProbeState.OK: "", ProbeState.WARNING: "yellow", ProbeState.BROKEN: "red"}
_NO_PID = (
    "hbmcomm info: there is no --pid any more; /proc/PID/numa_maps shows where a process's "
    "segments are (lines with memfd:hbmcomm-POLICY), `numastat -p PID` all of its memory"
)


def info(
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    pid: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show what is on this machine, and how each was found.
    Exit status: 0 when groups of hbm work here, at least on one node; 1 when none does.
    """
    if pid is not None:
        typer.echo(_NO_PID, err=True)
        raise typer.Exit(2)
    findings = run_probes()
    usable = all(finding.state is not ProbeState.BROKEN for finding in findings)
    if json:
        typer.echo(json_module.dumps(_document(findings, usable), indent=1))
    else:
        Console().print(_table(findings, usable))
    raise typer.Exit(0 if usable else 1)


def _document(findings: list[Finding], usable: bool) -> dict[str, object]:
    """Return {"usable": bool, name of a finding: {"state", "value", "found_by", "remedy", ...},
    ...}."""
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
