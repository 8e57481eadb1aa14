"""Collectives between nodes over slow links, compared with the links' bound, without leaders and
with Gloo.

    sudo .venv/bin/python -m benchmarks.collectives.nodes --json nodes.json --markdown nodes.md

Network namespaces emulate the nodes, and a switch joins them. Each node's link is limited to
`--rate` in each direction, and MPI may use only TCP over this link. The program needs root and
iproute2, and removes the namespaces at the end.

The bound is the least bytes that some link must carry (layouts.py derives them), divided by TCP's
rate. The program measures this rate first, with both directions at full load. The rate counts
payload alone: headers take about 5 % of `--rate`. Processor seconds are summed over all ranks.
Without leaders, hbm uses MPI between all ranks.

With `--delay` a program of `make bench` is the link between two nodes. The bound then has a delay
for each phase of a collective.
"""

from __future__ import annotations

import json as json_module
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from benchmarks.collectives.layouts import BACKENDS, COLLECTIVES, MIB, PHASES, WITHOUT, Layout
from benchmarks.markdown import Table
from benchmarks.namespaces import (
    QUEUE,
    Node,
    NoNamespaces,
    address,
    distant_link,
    switched_nodes,
)
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    describe_machine,
    sampled,
)

LINK = "link"  # contender: the time for the least bytes at TCP's rate
_PORT = 29400  # inside the namespaces
_LIMIT = 3600  # seconds for the ranks of a layout
_LAYOUTS = ["2x2", "2x4", "3x1", "4x2", "3+1"]
_COLLECTIVES = list(COLLECTIVES)
_RATES = ["200mbit", "1gbit"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    layout: Annotated[list[str], typer.Option(help="nodes x ranks, or 3+1")] = _LAYOUTS,
    rate: Annotated[list[str], typer.Option(help="rate of a link, as for tc(8)")] = _RATES,
    queue: Annotated[str, typer.Option(help="longest wait for a link, as for tc(8)")] = QUEUE,
    delay: Annotated[float, typer.Option(min=0, help="of a link, in ms; needs two nodes")] = 0,
    mib: Annotated[list[float], typer.Option(help="sizes of the tensors")] = [4, 64],  # noqa: B006
    collective: Annotated[list[str], typer.Option(help=", ".join(COLLECTIVES))] = _COLLECTIVES,
    rounds: Annotated[int, typer.Option(min=1, help="samples of each median")] = 5,
    quick: Annotated[bool, typer.Option(help="1 MiB on 2x2 and 3+1 alone, one round")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table.")] = None,
    json: Json = None,
) -> None:
    """Measure collectives of float32 between nodes.

    The exit status never depends on a time.
    """
    check_file(json)
    check_file(markdown)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if unknown := set(collective) - set(COLLECTIVES):
        raise typer.BadParameter(
            f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(COLLECTIVES)}"
        )
    if quick:
        layout, rate, mib, rounds = ["2x2", "3+1"], ["1gbit"], [1], 1
    try:
        layouts = [Layout(text) for text in layout]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if delay and any(one.nodes != 2 for one in layouts):
        raise typer.BadParameter("a link with a delay joins two nodes: choose such layouts")
    plan = {"mib": mib, "rounds": rounds, "collectives": collective}
    found: list[Measurement] = []
    notes = []
    for each_rate in rate:
        for one in layouts:
            link = each_rate + (f", {delay:g} ms" if delay else "")
            report.say(f"{one.text} at {link}")
            try:
                joined = _joined(one, each_rate, delay, queue)
                measured_there = _run(one, joined, plan)
            except (NoNamespaces, RuntimeError) as error:
                fail(f"{one.text} at {link}: {error}")
            goodput = measured_there["goodput"]
            notes.append(
                f"TCP over a link of {link} ({one.text}), both directions at a time: "
                f"{goodput * 8 / 1e6:.0f} Mbit/s"
            )
            found += measured(one, link, goodput, measured_there["rows"], delay)
    result = Result(
        benchmark="nodes",
        machine=describe_machine(),
        plan={"rounds": rounds, "queue": queue},
        contenders=BACKENDS,
        references=[LINK],
        notes=notes,
        measurements=found,
    )
    if markdown is not None:
        markdown.write_text("\n".join(table(result).markdown()) + "\n")
    finish(render(result), result, json)


def megabits(rate: str) -> float:
    """Return the Mbit/s of a rate in tc(8)'s notation. Raises typer.BadParameter."""
    for unit, size in (("gbit", 1000), ("mbit", 1)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * size
    raise typer.BadParameter(f"{rate} is no rate of a link with a delay: write 1gbit or 200mbit")


@contextmanager
def _joined(layout: Layout, rate: str, delay: float, queue: str) -> Iterator[Sequence[Node]]:
    if delay:
        with distant_link(megabits(rate), delay) as link:
            yield link.nodes
    else:
        with switched_nodes(layout.nodes, rate, queue) as nodes:
            yield nodes


def _run(
    layout: Layout, joined: AbstractContextManager[Sequence[Node]], plan: dict[str, Any]
) -> Any:
    """Return the results that rank 0 printed.

    Raises NoNamespaces. Raises RuntimeError if a rank fails.
    """
    with joined as nodes, ExitStack() as stack:
        processes = []
        for process in _start(nodes, layout, plan):
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        output, _ = processes[0].communicate(timeout=_LIMIT)
        codes = [process.wait(timeout=_LIMIT) for process in processes]
    if any(codes):
        raise RuntimeError(f"ranks failed: their exit codes are {codes}")
    return json_module.loads(output.splitlines()[-1])


def _start(
    nodes: Sequence[Node], layout: Layout, plan: dict[str, Any]
) -> Iterator[subprocess.Popen[str]]:
    """Start the ranks, node by node. Rank 0 prints the results."""
    arguments = json_module.dumps(plan | {"layout": layout.text})
    local_ranks = [
        (number, local) for number, count in enumerate(layout.ranks_of) for local in range(count)
    ]
    for rank, (number, local) in enumerate(local_ranks):
        node = nodes[number]
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(layout.ranks),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(layout.ranks_of[number]),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(_PORT),
            "HBMCOMM_NODE_ID": str(number),
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": node.link,
            "GLOO_SOCKET_IFNAME": node.link,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore::FutureWarning",  # hides PyTorch's warnings about old names
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # hides warnings that addresses have no host names
        }
        command = [*node.launcher, sys.executable, "-m", "benchmarks.collectives.nodes_rank"]
        output = subprocess.PIPE if rank == 0 else None
        yield subprocess.Popen([*command, arguments], env=environment, stdout=output, text=True)


def measured(
    layout: Layout, rate: str, goodput: float, rows: Sequence[dict[str, Any]], delay: float = 0
) -> Iterator[Measurement]:
    """Yield the measurements. The contender LINK is the time of the least bytes at TCP's rate, and
    a `delay`, in ms, for each phase of the collective."""
    for row in rows:
        of = {"layout": layout.text, "rate": rate}
        of |= {"collective": row["collective"], "mib": row["mib"]}
        least = layout.least_bytes(row["collective"], row["mib"])
        bound = least / goodput * 1e6 + PHASES[row["collective"]] * delay * 1e3
        yield sampled(of, LINK, [bound], values={"crossed_bytes": least})
        for backend in BACKENDS:
            samples = [seconds * 1e6 for seconds in row["seconds"][backend]]
            values = {
                "crossed_bytes": row["crossed"][backend],
                "processor_s": statistics.median(row["processor"][backend]),
            }
            yield sampled(of, backend, samples, values=values)


def table(result: Result) -> Table:
    """Return a table of the medians, the bound, the bytes over the busiest link and the processor
    seconds of a call."""
    heading = ["nodes, rate", "collective", "MiB", "bound, ms", "hbm, ms", "without leaders, ms"]
    heading += ["gloo, ms", "hbm / bound", "without leaders / hbm", "gloo / hbm"]
    heading += ["crossed, MiB", "crossed / least"]
    heading += ["gloo's / least", "hbm CPU, s", "gloo CPU, s"]
    rows = []
    for row in report.rows(result.measurements):
        of, hbm, gloo = row[LINK].of, row["hbm"], row["gloo"]
        bound, least = row[LINK].median, row[LINK].values["crossed_bytes"]
        without = row[WITHOUT].median if WITHOUT in row else None  # older records lack it
        crossed = [one.values["crossed_bytes"] for one in (hbm, gloo)]
        follow = of["collective"] == "fsdp_step"  # no ratio: `least` adds up opposite directions
        rows.append(
            [f"{of['layout']}, {of['rate']}", of["collective"], f"{of['mib']:g}"]
            + [f"{bound / 1e3:.1f}", f"{hbm.median / 1e3:.1f}"]
            + [f"{without / 1e3:.1f}" if without else "-", f"{gloo.median / 1e3:.1f}"]
            + [f"{hbm.median / bound:.2f}", f"{without / hbm.median:.2f}" if without else "-"]
            + [f"{gloo.median / hbm.median:.2f}"]
            + [
                f"{crossed[0] / MIB:.2f}",
                *("-" if follow else f"{one / least:.2f}" for one in crossed),
            ]
            + [f"{one.values['processor_s']:.3f}" for one in (hbm, gloo)]
        )
    return Table(heading, rows)


def render(result: Result) -> RenderableType:
    shown = table(result)
    drawn = report.table_of("float32 between nodes", shown.heading)
    for row in shown.rows:
        drawn.add_row(*row)
    return report.group([drawn], result)


if __name__ == "__main__":
    app()
