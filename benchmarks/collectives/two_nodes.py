"""allreduce between two nodes over a slow link, against what the link allows, and against Gloo.

    sudo .venv/bin/python -m benchmarks.collectives.two_nodes

Two network namespaces stand for the nodes. A virtual cable joins them, shaped to `--rate` in each
direction, and MPI may use nothing but TCP over it. Root and iproute2 are needed; everything is
removed at the end.

The bound. Each of n nodes holds a sum of its own ranks. However they proceed, a node must send at
least (n-1)/n of a tensor's bytes for the others to reduce, and as much of what it has reduced for
the others to have. So each direction of its link carries 2(n-1)/n x bytes: for two nodes, the
tensor once. The link's rate is measured before, by TCP in both directions at a time, so that it
counts payload; of the nominal rate, headers take some 5 %.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.namespaces import Node, address, two_nodes

NODES = 2
MIB = 1 << 20
BACKENDS = ("hbm", "gloo")
PORT = 29400  # of the namespaces' own
PROBE_BYTES = 32 * MIB
LIMIT = 600  # seconds, for the ranks

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def bytes_each_way(mib: int) -> float:
    """Return the bytes that each direction of a node's link must carry."""
    return 2 * (NODES - 1) / NODES * mib * MIB


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
) -> None:
    """Measure allreduce of float32 between two nodes."""
    if context.invoked_subcommand is not None:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    arguments = [f"--rounds={rounds}", *(f"--mib={size}" for size in mib)]
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
    found = json.loads(output.splitlines()[-1])
    show(found["goodput"], found["rows"], ranks, rate)


def show(goodput: float, rows: list[dict[str, Any]], ranks: int, rate: str) -> None:
    table = Table(title=f"allreduce of float32: {NODES} nodes of {ranks} ranks, a link of {rate}")
    for name in ("size", "bound", "hbm", "gloo", "hbm / bound", "gloo / hbm", "crossed"):
        table.add_column(name, justify="right")
    for row in rows:
        hbm, gloo = row["seconds"]["hbm"], row["seconds"]["gloo"]
        bound = bytes_each_way(row["mib"]) / goodput
        table.add_row(
            f"{row['mib']} MiB",
            *(f"{seconds * 1e3:.1f} ms" for seconds in (bound, hbm, gloo)),
            f"{hbm / bound:.3f}",
            f"{gloo / hbm:.2f}",
            f"{row['crossed']['hbm'] / MIB:.1f} MiB",
        )
    console = Console()
    console.print(table)
    console.print(f"TCP over the link, both directions at a time: {goodput * 8 / 1e6:.0f} Mbit/s")


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


def received(node: int) -> int:
    """Return the bytes that have come over the link."""
    return int(Path(f"/sys/class/net/link{node}/statistics/rx_bytes").read_text())


def largest(group: dist.ProcessGroup, value: float) -> float:
    """Return the largest of all ranks' values."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    return shared.item()


@app.command(hidden=True)
def rank(mib: Annotated[list[int], typer.Option()], rounds: Annotated[int, typer.Option()]) -> None:
    """Run one of the ranks that the benchmark starts."""
    torch.set_num_threads(1)
    node = int(os.environ["HBMCOMM_NODE_ID"])
    dist.init_process_group("hbm")
    groups = {"hbm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    gloo = groups["gloo"]
    goodput = measured_goodput(node) if os.environ["LOCAL_RANK"] == "0" else float("inf")
    goodput = -largest(gloo, -goodput)
    rows = []
    for size in mib:
        data = torch.ones(size * MIB // 4)
        seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        crossed = dict.fromkeys(BACKENDS, float("inf"))
        for turn in range(1 + rounds):
            for backend in BACKENDS:
                data.fill_(1)
                before = received(node)
                dist.barrier(gloo)
                begin = time.perf_counter()
                dist.all_reduce(data, group=groups[backend])
                spent = largest(gloo, time.perf_counter() - begin)
                assert (data == dist.get_world_size()).all()
                crossed[backend] = min(crossed[backend], -largest(gloo, -(received(node) - before)))
                if turn > 0:
                    seconds[backend].append(spent)
        for backend in BACKENDS:
            if crossed[backend] < bytes_each_way(size):
                raise RuntimeError(
                    f"only {crossed[backend]:.0f} bytes of {backend} came over the link: the "
                    f"others took another way"
                )
        medians = {backend: statistics.median(seconds[backend]) for backend in BACKENDS}
        rows.append({"mib": size, "seconds": medians, "crossed": crossed})
    if dist.get_rank() == 0:
        print(json.dumps({"goodput": goodput, "rows": rows}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    app()
