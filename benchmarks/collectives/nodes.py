"""Collectives between two nodes over a slow link, against what it allows, and against Gloo.

    sudo .venv/bin/python -m benchmarks.collectives.two_nodes

Two network namespaces stand for the nodes. A virtual cable joins them, shaped to `--rate` in each
direction, and MPI may use nothing but TCP over it. Root and iproute2 are needed; everything is
removed at the end.

The bound, of allreduce. Each of n nodes holds a sum of its own ranks. However they proceed, a node
must send at least (n-1)/n of a tensor's bytes for the others to reduce, and as much of what it has
reduced for the others to have. So each direction of its link carries 2(n-1)/n x bytes: for two
nodes, the tensor once. The others are half of it (LEAST): of reduce_scatter's input and of
all_gather's output a node gets the half that it lacks; a broadcast carries all; and of all_to_all's
input each rank sends half to the other node. The link's rate is measured before, by TCP in both
directions at a time, so that it counts payload; of the nominal rate, headers take some 5 %.
"""

from __future__ import annotations

import json as json_module
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import RenderableType
from rich.table import Table

from benchmarks.namespaces import Node, address, two_nodes
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, finish
from torch_hbmcomm.bench.result import Measurement, Result, describe_machine

NODES = 2
MIB = 1 << 20
BACKENDS = {"hbm": "hbm, on plain tensors", "gloo": "PyTorch's own backend"}
LINK = "link"  # what it needs for the least bytes, at the rate of TCP
PORT = 29400  # of the namespaces' own
PROBE_BYTES = 32 * MIB
LIMIT = 600  # seconds, for the ranks

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# What each direction of a node's link must carry, in tensors, with a number of ranks on each node.
LEAST: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 1,
    "reduce_scatter": lambda ranks: 1 / 2,
    "all_gather": lambda ranks: 1 / 2,
    "broadcast": lambda ranks: 1,
    "all_to_all": lambda ranks: ranks / 2,
}


def bytes_each_way(collective: str, mib: int, ranks: int) -> float:
    """Return the bytes that the busier direction of a node's link must carry."""
    return LEAST[collective](ranks) * mib * MIB


def start(
    nodes: Sequence[Node], ranks: int, arguments: list[str]
) -> Iterator[subprocess.Popen[str]]:
    """Starts `ranks` ranks on each node; the first prints the results."""
    for rank in range(NODES * ranks):
        node = nodes[rank // ranks]
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(NODES * ranks),
            "LOCAL_RANK": str(rank % ranks),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "HBMCOMM_NODE_ID": str(rank // ranks),
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": node.link,
            "GLOO_SOCKET_IFNAME": node.link,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # not that addresses have no names
        }
        enter = [*node.launcher, sys.executable, "-m", "benchmarks.collectives.two_nodes", "rank"]
        output = subprocess.PIPE if rank == 0 else None
        yield subprocess.Popen([*enter, *arguments], env=environment, stdout=output, text=True)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    mib: Annotated[list[int], typer.Option(help="sizes of the tensors")] = [16, 64],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="of which the median is shown")] = 9,
    ranks: Annotated[int, typer.Option(help="on each node")] = 2,
    rate: Annotated[str, typer.Option(help="of the link, as tc(8) writes it")] = "1gbit",
    collective: Annotated[list[str], typer.Option(help=", ".join(LEAST))] = ["all_reduce"],  # noqa: B006
    json: Json = None,
) -> None:
    """Measure collectives of float32 between two nodes."""
    if context.invoked_subcommand is not None:
        return
    check_file(json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if unknown := set(collective) - set(LEAST):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; choose from {', '.join(LEAST)}")
    arguments = [
        f"--rounds={rounds}",
        *(f"--mib={size}" for size in mib),
        *(f"--collective={name}" for name in collective),
    ]
    with two_nodes(rate) as nodes, ExitStack() as stack:
        processes = []
        for process in start(nodes, ranks, arguments):
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        output, _ = processes[0].communicate(timeout=LIMIT)
        codes = [process.wait(timeout=LIMIT) for process in processes]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    found = json_module.loads(output.splitlines()[-1])
    plan = {"nodes": NODES, "ranks": ranks, "rounds": rounds, "rate": rate}
    result = Result(
        benchmark="two_nodes",
        machine=describe_machine(),
        plan=plan,
        contenders=BACKENDS,
        references=[LINK],
        notes=[
            f"TCP over the link, both directions at a time: {found['goodput'] * 8 / 1e6:.0f} Mbit/s"
        ],
        measurements=list(measured(found["goodput"], found["rows"], ranks)),
    )
    finish(render(result), result, json)


def measured(goodput: float, rows: Sequence[dict[str, Any]], ranks: int) -> Iterator[Measurement]:
    """Make the measurements, with what the link needs for the least bytes as a contender."""
    for row in rows:
        of = {"collective": row["collective"], "mib": row["mib"]}
        least = bytes_each_way(row["collective"], row["mib"], ranks)
        yield Measurement(of, LINK, [least / goodput * 1e6], values={"crossed_bytes": least})
        for backend in BACKENDS:
            samples = [seconds * 1e6 for seconds in row["seconds"][backend]]
            crossed = {"crossed_bytes": row["crossed"][backend]}
            yield Measurement(of, backend, samples, values=crossed)


def in_rows(result: Result) -> Iterator[dict[str, Measurement]]:
    """Yield the measurements of each row by their contenders."""
    rows: dict[tuple[str, int], dict[str, Measurement]] = {}
    for one in result.measurements:
        rows.setdefault((one.of["collective"], one.of["mib"]), {})[one.contender] = one
    yield from rows.values()


def render(result: Result) -> RenderableType:
    """Return a table of the medians, beside what the link allows."""
    ranks, rate = result.plan["ranks"], result.plan["rate"]
    table = Table(title=f"float32: {NODES} nodes of {ranks} ranks, a link of {rate}")
    table.add_column("collective")
    for name in ("size", "bound", "hbm", "gloo", "hbm / bound", "gloo / hbm", "crossed", "/ least"):
        table.add_column(name, justify="right")
    for row in in_rows(result):
        bound, hbm, gloo = (row[name].median for name in (LINK, "hbm", "gloo"))
        crossed = row["hbm"].values["crossed_bytes"]
        table.add_row(
            row["hbm"].of["collective"],
            f"{row['hbm'].of['mib']} MiB",
            *(f"{one / 1e3:.1f} ms" for one in (bound, hbm, gloo)),
            f"{hbm / bound:.3f}",
            f"{gloo / hbm:.2f}",
            f"{crossed / MIB:.1f} MiB",
            f"{crossed / row[LINK].values['crossed_bytes']:.3f}",
        )
    return report.group([table], result)


# A rank.


def measured_goodput(node: int) -> float:
    """Return the bytes a second that TCP moves in each direction, while it does so in both."""
    if node == 0:
        with socket.create_server((address(0), PORT + 1)) as server:
            line, _ = server.accept()
    else:
        line = connect((address(0), PORT + 1))
    with line:
        seconds = []
        for _ in range(3):
            line.sendall(b"!")  # both are ready
            line.recv(1)
            begin = time.perf_counter()
            sender = threading.Thread(target=line.sendall, args=(bytes(PROBE_BYTES),))
            sender.start()
            left = PROBE_BYTES
            while left:
                left -= len(line.recv(min(left, MIB)))
            seconds.append(time.perf_counter() - begin)
            sender.join()
    return PROBE_BYTES / statistics.median(seconds)


def connect(where: tuple[str, int]) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection(where)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError(f"nobody listens at {where}")


def carried(node: int) -> list[int]:
    """Return the bytes that have come and gone over the link."""
    statistics_of_link = Path(f"/sys/class/net/link{node}/statistics")
    return [int((statistics_of_link / f"{way}_bytes").read_text()) for way in ("rx", "tx")]


def largest(group: dist.ProcessGroup, value: float) -> float:
    """Return the largest of all ranks' values."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    return shared.item()


class Call:
    """A collective on tensors of a size, whose content it checks.

    mib: of the whole tensor: all_gather's output, reduce_scatter's input.
    """

    def __init__(self, collective: str, mib: int):
        self.collective = collective
        self.ranks = dist.get_world_size()
        self.whole = torch.empty(mib * MIB // 4 // self.ranks * self.ranks)
        self.other = torch.empty_like(self.whole)
        self.share = torch.empty(len(self.whole) // self.ranks)

    def prepare(self) -> None:
        broadcast = self.collective == "broadcast"
        self.whole.fill_(0 if broadcast and dist.get_rank() != 0 else 1)
        self.other.fill_(0)
        self.share.fill_(1)

    def run(self, group: dist.ProcessGroup) -> None:
        if self.collective == "all_reduce":
            dist.all_reduce(self.whole, group=group)
        elif self.collective == "reduce_scatter":
            dist.reduce_scatter_tensor(self.share, self.whole, group=group)
        elif self.collective == "all_gather":
            dist.all_gather_into_tensor(self.other, self.share, group=group)
        elif self.collective == "broadcast":
            dist.broadcast(self.whole, 0, group=group)
        else:
            dist.all_to_all_single(self.other, self.whole, group=group)

    def check(self) -> None:
        result, value = {
            "all_reduce": (self.whole, self.ranks),
            "reduce_scatter": (self.share, self.ranks),
            "all_gather": (self.other, 1),
            "broadcast": (self.whole, 1),
            "all_to_all": (self.other, 1),
        }[self.collective]
        assert (result == value).all(), self.collective


@app.command(hidden=True)
def rank(
    mib: Annotated[list[int], typer.Option()],
    rounds: Annotated[int, typer.Option()],
    collective: Annotated[list[str], typer.Option()],
) -> None:
    """Run one of the ranks that the benchmark starts."""
    torch.set_num_threads(1)
    node = int(os.environ["HBMCOMM_NODE_ID"])
    dist.init_process_group("hbm")
    groups = {"hbm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    gloo = groups["gloo"]
    goodput = measured_goodput(node) if os.environ["LOCAL_RANK"] == "0" else float("inf")
    goodput = -largest(gloo, -goodput)
    rows = []
    for name in collective:
        for size in mib:
            call = Call(name, size)
            seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
            crossed = dict.fromkeys(BACKENDS, float("inf"))
            for turn in range(1 + rounds):
                for backend in BACKENDS:
                    call.prepare()
                    before = carried(node)
                    dist.barrier(gloo)
                    begin = time.perf_counter()
                    call.run(groups[backend])
                    spent = largest(gloo, time.perf_counter() - begin)
                    call.check()
                    ways = [now - then for now, then in zip(carried(node), before, strict=True)]
                    crossed[backend] = min(crossed[backend], largest(gloo, max(ways)))
                    if turn > 0:
                        seconds[backend].append(spent)
            for backend in BACKENDS:
                if crossed[backend] < bytes_each_way(name, size, dist.get_world_size() // NODES):
                    raise RuntimeError(
                        f"only {crossed[backend]:.0f} bytes of {backend}'s {name} came over the "
                        f"link: the others took another way"
                    )
            rows.append({"collective": name, "mib": size, "seconds": seconds, "crossed": crossed})
    if dist.get_rank() == 0:
        print(json_module.dumps({"goodput": goodput, "rows": rows}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    app()
