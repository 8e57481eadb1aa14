"""A parameter server on several boxes, compared with the bound of the links.

    sudo .venv/bin/python -m benchmarks.box.boxes --json boxes.json

Network namespaces emulate the machines, and a switch joins them. Each box and each worker has a
machine of its own, whose link has a limited rate in each direction. The workers exchange with the
boxes through hbmcomm.ParameterServer, and compute nothing. They do not wait for one another. The
program needs root and iproute2, and removes the namespaces at the end.

In an exchange a worker sends the model and receives it. So the link of a box carries
workers / boxes times the model in each direction, and the link of a worker the model. The bound is
the time that the slower of these links takes, at TCP's payload.

A sample is an exchange of one worker. Each worker's first exchange does not count.
"""

from __future__ import annotations

import math
import secrets
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from benchmarks.namespaces import PAYLOAD, Node, NoNamespaces, switched_nodes
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.box import ROLE
from torch_hbmcomm.bench.peer import Peer, PeerFailed, peer
from torch_hbmcomm.bench.report import Json, check_file, fail, finish, names
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    check_counts,
    describe_machine,
    sampled,
)
from torch_hbmcomm.sizes import MIB, parse_bytes

LINK = "link"  # contender: the time that the slowest link takes
_WORKER = "benchmarks.box.boxes_worker"
_LONGEST = 60.0  # seconds for an exchange at the bound; a worker has 180 s to answer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class BoxesPlan:
    """A choice of measurements. Raises ValueError for an invalid one.

    boxes, workers: numbers of boxes, and of workers; each pair of numbers is measured
    size: bytes of the model
    rounds: exchanges of each worker in a measurement, if an exchange takes as long as the bound
    box_megabits, worker_megabits: the rate of the link of a box, and of a worker, in Mbit/s
    """

    boxes: Sequence[int] = (1, 2, 4)
    workers: Sequence[int] = (4, 8)
    size: int = 32 * MIB
    rounds: int = 3
    box_megabits: int = 100
    worker_megabits: int = 100

    def __post_init__(self) -> None:
        check_counts(self, {"rounds": 1, "box_megabits": 1, "worker_megabits": 1})
        for name in ("boxes", "workers"):
            if min(getattr(self, name), default=0) < 1:
                raise ValueError(f"{name}: at least one number, and each at least 1")
        slowest = self.bound(min(self.boxes), max(self.workers))[0]
        if (self.rounds + 1) * slowest > 2 * _LONGEST:
            raise ValueError(
                f"with {max(self.workers)} workers and boxes={min(self.boxes)} an exchange takes "
                f"at least {slowest:.0f} s, so {self.rounds} rounds take too long: lower size, "
                "rounds or workers"
            )

    def bound(self, boxes: int, workers: int) -> tuple[float, str]:
        """Return the least seconds of an exchange, and the slowest links."""
        at_box = workers / boxes * self.size / _payload(self.box_megabits)
        at_worker = self.size / _payload(self.worker_megabits)
        if math.isclose(at_box, at_worker):
            return at_box, "all"
        return max((at_box, "boxes'"), (at_worker, "workers'"))


def _payload(megabits: int) -> float:
    """Return the bytes of TCP's payload that a link carries in a second."""
    return megabits * 1e6 / 8 * PAYLOAD


def run(plan: BoxesPlan) -> Result:
    """Measure all pairs of numbers. Raises NoNamespaces, and PeerFailed."""
    found: list[Measurement] = []
    with _machines(plan) as machines:
        for workers in plan.workers:
            for boxes in plan.boxes:
                report.say(f"{workers} workers with {boxes} boxes")
                found += machines.measure(boxes, workers)
    return Result(
        benchmark="boxes",
        machine=describe_machine(),
        plan=asdict(plan),
        contenders={"hbm": "hbmcomm.ParameterServer, asynchronous"},
        references=[LINK],
        notes=["processors: share of all cores that was in use, by all programs of this machine"],
        measurements=found,
    )


class _Machines:
    """The processes of the boxes and the workers, each on a machine of its own.

    urls: the addresses of the boxes
    """

    def __init__(
        self, plan: BoxesPlan, nodes: Sequence[Node], urls: Sequence[str], workers: Sequence[Peer]
    ) -> None:
        self._plan = plan
        self._nodes = nodes
        self._urls = urls
        self._workers = workers

    def measure(self, boxes: int, workers: int) -> Iterator[Measurement]:
        """Yield the measurement of a pair of numbers, and its bound."""
        plan, taking_part = self._plan, self._workers[:workers]
        bound, links = plan.bound(boxes, workers)
        before = self._received(boxes)
        _all(
            taking_part,
            "join",
            urls=self._urls[:boxes],
            token=_TOKEN,
            name=f"{boxes}-{workers}",
            workers=workers,
            size=plan.size,
        )
        used = _processor_times()
        turns = _all(taking_part, "run", seconds=plan.rounds * bound)
        busy, idle = (now - then for now, then in zip(_processor_times(), used, strict=True))
        crossed = self._received(boxes) - before
        _all(taking_part, "leave")
        samples = [seconds for turn in turns for seconds in turn["seconds"]]
        pushed, pulled = (statistics.fmean(turn[way] for turn in turns) for way in _WAYS)
        if crossed < pushed * len(samples):
            raise PeerFailed(
                f"only {crossed} of {pushed * len(samples):.0f} bytes crossed the boxes' links: "
                "the rest took another path"
            )
        of = {"workers": workers, "boxes": boxes, "slowest_links": links}
        yield sampled(of, LINK, [bound * 1e6])
        values = {
            "pushed_bytes": pushed,
            "pulled_bytes": pulled,
            "exchanges_per_s": workers / statistics.fmean(samples),
            "processors": busy / (busy + idle),
        }
        yield sampled(of, "hbm", [seconds * 1e6 for seconds in samples], values=values)

    def _received(self, boxes: int) -> int:
        """Return the bytes that the first boxes have received over their links."""
        return sum(node.received() for node in self._nodes[:boxes])


_TOKEN = secrets.token_hex(16)
_WAYS = ("pushed", "pulled")


@contextmanager
def _machines(plan: BoxesPlan) -> Iterator[_Machines]:
    """Start the machines and their processes."""
    boxes, workers = max(plan.boxes), max(plan.workers)
    rates = [f"{plan.box_megabits}mbit"] * boxes + [f"{plan.worker_megabits}mbit"] * workers
    with ExitStack() as stack:
        nodes = stack.enter_context(switched_nodes(len(rates), rates))

        def start(node: Node) -> Peer:
            arguments = ["box"] if nodes.index(node) < boxes else []
            role = ROLE if arguments else _WORKER
            return stack.enter_context(peer(role, node.launcher, arguments))

        with ThreadPoolExecutor(len(nodes)) as threads:  # a process takes seconds to start
            processes = list(threads.map(start, nodes))
        # The weights and the workers' delta buffers, all in the only box.
        memory = (1 + workers) * plan.size + 16 * MIB
        urls = [
            process.ask(
                "open",
                listen=f"{node.address}:0",
                memory=memory,
                token=_TOKEN,
                threads=0,
                store=None,
            )
            for node, process in zip(nodes[:boxes], processes, strict=False)
        ]
        yield _Machines(plan, nodes, urls, processes[boxes:])


def _all(peers: Sequence[Peer], method: str, **arguments: Any) -> list[Any]:
    """Call a method of all peers at the same time. Returns their results."""
    for one in peers:
        one.tell(method, **arguments)
    return [one.answer() for one in peers]


def _processor_times() -> tuple[int, int]:
    """Return the time that the cores were in use, and idle, since the start of the machine."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    times = [int(field) for field in fields]  # of proc(5): from user to softirq
    idle = times[3] + times[4]  # idle and iowait
    return sum(times) - idle, idle


def render(result: Result) -> RenderableType:
    """Return a table with a row for each pair of numbers."""
    headings = ["workers", "boxes", "exchange, s", "bound, s", "exchange / bound", "slowest links"]
    headings += ["exchanges/s, all", "sent, MB", "received, MB", "processors"]
    table = report.table_of("exchanges with several boxes", headings)
    for row in report.rows(result.measurements):
        hbm, link = row["hbm"], row[LINK]
        values = hbm.values
        table.add_row(
            *(str(hbm.of[name]) for name in ("workers", "boxes")),
            *(f"{microseconds / 1e6:.2f}" for microseconds in (hbm.mean, link.median)),
            f"{hbm.mean / link.median:.2f}",
            str(hbm.of["slowest_links"]),
            f"{values['exchanges_per_s']:.2f}",
            *(f"{values[f'{way}_bytes'] / 1e6:.1f}" for way in _WAYS),
            f"{values['processors']:.0%}",
        )
    return report.group([table], result)


@app.command()
def main(
    boxes: Annotated[str, typer.Option(help="Numbers of boxes, separated by commas.")] = "1,2,4",
    workers: Annotated[str, typer.Option(help="Numbers of workers, as for boxes.")] = "4,8",
    size: Annotated[str, typer.Option(help="Of the model, as in 32MiB.")] = "32MiB",
    rounds: Annotated[int, typer.Option(help="Exchanges of each worker, at the bound.")] = 3,
    box_megabits: Annotated[int, typer.Option(help="Rate of a box's link, Mbit/s.")] = 100,
    worker_megabits: Annotated[int, typer.Option(help="Rate of a worker's link, Mbit/s.")] = 100,
    json: Json = None,
) -> None:
    """Measure exchanges of a parameter server with several boxes over slow links.

    The exit status never depends on a time.
    """
    check_file(json)
    try:
        plan = BoxesPlan(
            boxes=[int(count) for count in names(boxes)],
            workers=[int(count) for count in names(workers)],
            size=parse_bytes(size),
            rounds=rounds,
            box_megabits=box_megabits,
            worker_megabits=worker_megabits,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the namespaces
    try:
        result = run(plan)
    except (NoNamespaces, PeerFailed) as error:
        fail(str(error))
    finish(render(result), result, json)


if __name__ == "__main__":
    app()
