"""A rank of benchmarks.collectives.nodes: hbm, hbm without leaders and Gloo take turns."""

from __future__ import annotations

import json
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.collectives.layouts import BACKENDS, MIB, WITHOUT, Layout
from benchmarks.namespaces import address
from torch_hbmcomm import Options

_PROBE_BYTES = 16 * MIB
_PROBE_PORT = 29401


class Call:
    """A collective on tensors of a size, with a check of its result.

    A step of FSDP gathers the parameters twice, for the forward and the backward pass, and reduces
    and scatters the gradients.

    mib: size in MiB of the whole tensor: the output of all_gather, the input of reduce_scatter.
    """

    def __init__(self, collective: str, mib: float):
        self.collective = collective
        self.ranks = dist.get_world_size()
        self.whole = torch.empty(int(mib * MIB) // 4 // self.ranks * self.ranks)
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
        elif self.collective == "all_to_all":
            dist.all_to_all_single(self.other, self.whole, group=group)
        else:
            dist.all_gather_into_tensor(self.other, self.share, group=group)
            dist.all_gather_into_tensor(self.other, self.share, group=group)
            dist.reduce_scatter_tensor(self.share, self.whole, group=group)

    def check(self) -> None:
        expected: dict[str, list[tuple[torch.Tensor, int]]] = {
            "all_reduce": [(self.whole, self.ranks)],
            "reduce_scatter": [(self.share, self.ranks)],
            "all_gather": [(self.other, 1)],
            "broadcast": [(self.whole, 1)],
            "all_to_all": [(self.other, 1)],
            "fsdp_step": [(self.other, 1), (self.share, self.ranks)],
        }
        for result, value in expected[self.collective]:
            assert (result == value).all(), self.collective


def run(layout: Layout, sizes: list[float], rounds: int, collectives: list[str]) -> None:
    """Measure all collectives. Rank 0 prints the results."""
    torch.set_num_threads(1)
    node = int(os.environ["HBMCOMM_NODE_ID"])
    dist.init_process_group("hbm")
    gloo: Any = dist.new_group(backend="gloo")
    without = dist.new_group(backend="hbm", pg_options=Options(transport="mpi"))
    groups: dict[str, Any] = {"hbm": dist.group.WORLD, WITHOUT: without, "gloo": gloo}
    first = os.environ["LOCAL_RANK"] == "0" and node in (0, 1)
    goodput = -_over_ranks(gloo, -_goodput(node) if first else float("-inf"), dist.ReduceOp.MAX)
    rows = []
    for name in collectives:
        for mib in sizes:
            found = _measure(Call(name, mib), groups, node, rounds)
            least = layout.least_crossed(name, mib)
            for backend in BACKENDS:
                if found["crossed"][backend] < least:
                    raise RuntimeError(
                        f"only {found['crossed'][backend]:.0f} bytes of {backend}'s {name} crossed "
                        f"the links, not {least:.0f}: the rest took another path"
                    )
            rows.append({"collective": name, "mib": mib, **found})
    if dist.get_rank() == 0:
        print(json.dumps({"goodput": goodput, "rows": rows}), flush=True)
    dist.destroy_process_group()


def _measure(call: Call, groups: dict[str, Any], node: int, rounds: int) -> dict[str, Any]:
    """Return each backend's figures.

    - "seconds": the time of each call, except the first, on its slowest rank
    - "processor": the processor time of each call, except the first, summed over all ranks
    - "crossed": the bytes that a call moved over the busiest link, least of all calls
    """
    gloo = groups["gloo"]
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    processor: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    crossed = dict.fromkeys(BACKENDS, float("inf"))
    for turn in range(1 + rounds):
        for backend in BACKENDS:
            call.prepare()
            dist.barrier(gloo)
            before, used, begin = _carried(node), _processor_seconds(), time.perf_counter()
            call.run(groups[backend])
            spent, used = time.perf_counter() - begin, _processor_seconds() - used
            slowest = _over_ranks(gloo, spent, dist.ReduceOp.MAX)
            ways = [now - then for now, then in zip(_carried(node), before, strict=True)]
            call.check()
            busiest = _over_ranks(gloo, max(ways), dist.ReduceOp.MAX)
            total = _over_ranks(gloo, used, dist.ReduceOp.SUM)
            crossed[backend] = min(crossed[backend], busiest)
            if turn > 0:
                seconds[backend].append(slowest)
                processor[backend].append(total)
    return {"seconds": seconds, "processor": processor, "crossed": crossed}


def _processor_seconds() -> float:
    """Return the processor time of this process, including the kernel's."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _carried(node: int) -> list[int]:
    """Return the bytes that this node's link has received and sent."""
    counters = Path(f"/sys/class/net/link{node}/statistics")
    return [int((counters / f"{way}_bytes").read_text()) for way in ("rx", "tx")]


def _over_ranks(group: Any, value: float, operator: Any) -> float:
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, operator, group=group)
    return shared.item()


def _goodput(node: int) -> float:
    """Return TCP's bytes per second in one direction between nodes 0 and 1.

    Both directions are at full load.
    """
    where = (address(0), _PROBE_PORT)
    if node == 0:
        with socket.create_server(where) as server:
            line, _ = server.accept()
    else:
        line = _retried(lambda: socket.create_connection(where))
    with line:
        seconds = []
        for _ in range(3):
            line.sendall(b"!")  # both nodes are ready
            line.recv(1)
            begin = time.perf_counter()
            sender = threading.Thread(target=line.sendall, args=(bytes(_PROBE_BYTES),))
            sender.start()
            left = _PROBE_BYTES
            while left:
                left -= len(line.recv(min(left, MIB)))
            seconds.append(time.perf_counter() - begin)
            sender.join()
    return _PROBE_BYTES / statistics.median(seconds)


def _retried(connect: Callable[[], socket.socket]) -> socket.socket:
    for _ in range(100):
        try:
            return connect()
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError("node 0 does not listen")


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    run(Layout(plan["layout"]), plan["mib"], plan["rounds"], plan["collectives"])
