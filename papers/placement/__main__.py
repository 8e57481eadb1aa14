"""The placement of memory in virtual machines that have HBM: python -m papers.placement --help

QEMU emulates the machines. The kernel reports the real node of each page. Times would mean nothing,
so the benchmark measures no times.
"""

from __future__ import annotations

import json as json_module
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from guest import boot, kernel, ranks
from guest.topology import TOPOLOGIES, Topology
from rich.table import Table

from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish
from torch_hbmcomm.bench.result import Findings, Measurement, Section, Unavailable, check_names
from torch_hbmcomm.bench.result import run as run_sections
from torch_hbmcomm.sizes import MIB, parse_bytes

PLACEMENT, MODES = "placement", "modes"
CLUSTERS = {"quadrant": "hbm", "SNC-4": "snc4"}  # the paper's name -> topology of the guest
BINDINGS = {"host": "none", "4 containers": "numa"}
POLICIES = {"DDR": "ddr", "HBM": "preferred"}
MEMORY_MODES = ("cache", "hybrid")  # the other section measures flat mode
_RANKS = 4
_FLOAT32 = 4  # bytes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Plan:
    """The measurements of a run.

    size: bytes of a tensor of float32; all ranks have equal parts.
    """

    sections: tuple[str, ...] = (PLACEMENT, MODES)
    size: int = 4 * MIB
    ranks: int = _RANKS


def _require_guest() -> None:
    for needed in (kernel.VMLINUX, boot.PROGRAMS / "guest_collectives"):
        if not needed.exists():
            raise Unavailable(f"{needed} is missing: make vm-programs")


@contextmanager
def _guest() -> Iterator[Path]:
    """Make a directory for a guest's output. Raises Unavailable if the guest cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        except boot.GuestError as error:
            raise Unavailable(str(error)) from error


def shares(
    reports: ranks.Reports, machine: Topology, memory: str, job: ranks.Job
) -> list[Measurement]:
    """Return the placement of memory, for each collective and kind of memory.

    A measurement has the bytes of all ranks, and their share on nodes of the requested memory. If
    ranks are bound, it also has the share on the rank's own node of that memory.
    """
    asked = set(machine.hbm_nodes if memory == "HBM" else range(machine.cpu_nodes))
    found = []
    for collective, what in product(ranks.COLLECTIVES, ranks.WHATS):
        lies = {rank: reports[collective, rank, what].ours for rank in range(job.ranks)}
        total = sum(sum(nodes.values()) for nodes in lies.values())
        there = [size for nodes in lies.values() for node, size in nodes.items() if node in asked]
        values = {"bytes": total, "share": sum(there) / total}
        if job.bind == "numa":
            own = {rank: rank * machine.cpu_nodes // job.ranks for rank in lies}
            if memory == "HBM":
                own = {rank: machine.hbm_of(node) for rank, node in own.items()}
            values["own_share"] = sum(lies[rank].get(own[rank], 0) for rank in lies) / total
        found.append(Measurement({"collective": collective}, what, values=values))
    return found


def _measure_placement(plan: Plan, findings: Findings) -> None:
    _require_guest()
    for cluster, topology in CLUSTERS.items():
        findings.progress(cluster)
        cells = list(product(BINDINGS, POLICIES))
        jobs = [
            ranks.Job(plan.ranks, POLICIES[memory], BINDINGS[place], plan.size)
            for place, memory in cells
        ]
        with _guest() as folder:
            reported = ranks.run(topology, jobs, folder)
        for (place, memory), job, reports in zip(cells, jobs, reported, strict=True):
            of = {"section": PLACEMENT, "cluster": cluster, "place": place, "memory": memory}
            for one in shares(reports, TOPOLOGIES[topology], memory, job):
                findings.add([Measurement({**of, **one.of}, one.contender, values=one.values)])


def _measure_modes(plan: Plan, findings: Findings) -> None:
    """Run `hbmcomm info` in a guest of each mode."""
    _require_guest()
    command: list[str | Path] = [
        boot.REPOSITORY / ".venv" / "bin" / "python", "-m", "torch_hbmcomm.cli", "info", "--json"
    ]  # fmt: skip
    for topology in MEMORY_MODES:
        findings.progress(topology)
        with _guest() as folder:
            result = boot.run(topology, command, folder, check=False)
        if not result.stdout:
            raise Unavailable(f"hbmcomm info printed nothing in the guest: {result.stderr}")
        info = json_module.loads(result.stdout)
        nodes, hbm = info["numa"]["nodes"], info["hbm"]
        of = {"section": MODES, "guest": topology, "mode": hbm["mode"]}
        of["found_by"] = hbm["found_by"].splitlines()[-1]
        values = {"nodes": len(nodes), "hbm_nodes": sum(node["is_hbm"] for node in nodes)}
        findings.add([Measurement(of, "hbmcomm info", values=values)])


SECTIONS = {
    PLACEMENT: Section(
        PLACEMENT, "placement of the memory of broadcast, gather and allreduce", _measure_placement
    ),
    MODES: Section(MODES, "memory modes by hbmcomm info", _measure_modes),
}


def shown(found: list[Measurement]) -> Table:
    """Return a table of the measurements, a line each."""
    table = Table("what", "who", "found")
    for one in found:
        values: Mapping[str, float] = one.values
        said = ", ".join(f"{name} {value:,.4g}" for name, value in values.items())
        table.add_row(", ".join(map(str, one.of.values())), one.contender, said)
    return table


@app.command()
def main(
    sections: Annotated[str, typer.Option(help="Names separated by commas.")] = ",".join(SECTIONS),
    size: Annotated[str, typer.Option(help="Bytes of a tensor.")] = "4MiB",
    json: Json = None,
) -> None:
    """Report the nodes of pages, as the kernel gives them. It measures no times."""
    check_file(json)
    plan = Plan(tuple(sections.split(",")), parse_bytes(size))
    try:
        check_names("section", plan.sections, SECTIONS)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if plan.size < 1 or plan.size % (_FLOAT32 * plan.ranks) != 0:
        raise typer.BadParameter(
            f"{size}: {plan.ranks} ranks need whole elements of {_FLOAT32} bytes each"
        )
    result = run_sections(PLACEMENT, SECTIONS, plan, report.say)
    if not result.measurements:
        fail("; ".join(result.unavailable.values()))
    finish(report.group([shown(list(result.measurements))], result), result, json)


if __name__ == "__main__":
    app()
